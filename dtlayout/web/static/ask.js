// ask(question) → document: the one function that the page knows of the planner. Here the server of `dtlayout web` answers.
export async function ask(question, signal) {
  let answer;
  try {
    answer = await fetch('ask', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(question), signal});
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Error('dtlayout web no longer answers: start it again, and open the address that it prints.');
  }
  if (answer.status === 413) return {ok: false, problems: ['the file is too large for a question'], fields: ['file']};
  if (answer.status === 500) throw new Error('The planner failed, which is a bug: the terminal of dtlayout web shows where.');
  if (!answer.ok) throw new Error(`dtlayout web refuses this page (${answer.status}): open the address that it prints.`);
  return answer.json();
}
