// ask(question) → document: the one function that the page knows of the planner. Here a worker of this page answers.
const worker = new Worker('worker.js', {type: 'module'}), waiting = new Map();
let asked = 0;

worker.addEventListener('message', ({data: {number, document, problem}}) => {
  const {resolve, reject} = waiting.get(number);
  waiting.delete(number);
  if (problem === undefined) resolve(JSON.parse(document));
  else reject(new Error(`The planner failed: ${problem}`));
});
worker.addEventListener('error', event => {
  for (const {reject} of waiting.values()) reject(new Error(`The planner did not start: ${event.message}`));
  waiting.clear();
});

export function ask(question) {
  asked += 1;
  const number = asked;
  worker.postMessage({number, question: JSON.stringify(question)});
  return new Promise((resolve, reject) => waiting.set(number, {resolve, reject}));
}
