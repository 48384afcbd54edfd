// The planner in a worker: Python by Pyodide, which answers as `dtlayout web` does.
import {loadPyodide} from './pyodide.mjs';

async function start() {
  const [python, archive] = await Promise.all([
    loadPyodide({indexURL: new URL('.', import.meta.url).href}),
    fetch('planner.zip').then(found => found.arrayBuffer()),
  ]);
  python.unpackArchive(archive, 'zip', {extractDir: python.runPython('import site; site.getsitepackages()[0]')});
  python.runPython('import json\nfrom dtlayout.commands.ask import ask');
  return python.runPython('lambda text: json.dumps(ask(json.loads(text)), allow_nan=False)');
}

const ready = start();
addEventListener('message', async ({data: {number, question}}) => {
  try {
    postMessage({number, document: (await ready)(question)});
  } catch (error) {
    postMessage({number, problem: String(error.message ?? error)});
  }
});
