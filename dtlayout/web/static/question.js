// The question: what the controls say, what is asked of the planner, and the link that keeps both.
const TEXTS = ['model', 'gpu', 'gpus', 'gpus_per_node', 'seq_len', 'global_batch', 'engine', 'precision', 'recompute', 'max_memory', 'fix', 'avoid', 'tokens', 'price'];
const STATE = ['layout', 'other', 'why_not'];  // what is opened and asked beside
export const FIRST = {
  model: 'llama3.1-8b', gpu: 'h100-80g-sxm', gpus: '64', gpus_per_node: '', seq_len: '8192', global_batch: '512', engine: 'dtlayout',
  precision: 'compute', recompute: '', max_memory: '', fix: '', avoid: '', tokens: '1T', price: '2', layout: '', other: '', why_not: '', file: null,
};

const control = name => document.getElementById(name);

export function readControls(state) {
  return {...state, ...Object.fromEntries(TEXTS.map(name => [name, control(name).value.trim()]))};
}

export function writeControls(state) {
  for (const name of TEXTS) {
    const found = control(name), value = state[name];
    if (found.tagName === 'SELECT' && ![...found.options].some(each => each.value === value)) found.append(new Option(value, value));
    if (found.value !== value) found.value = value;
  }
  moveSliders();
  control('given').hidden = !state.file;
  control('given').firstElementChild.textContent = state.file ? state.file.name : '';
  for (const name of ['gpus', 'seq_len', 'global_batch']) control(name).placeholder = state.file && !state[name] ? 'as in the file' : '';
}

// A slider stands where its number is, and moves it: on a log scale by powers of two.
export function moveSliders() {
  for (const slider of document.querySelectorAll('input[data-of]')) {
    const value = Number(control(slider.dataset.of).value);
    const isLog = slider.dataset.scale === 'log';
    slider.value = value > 0 ? (isLog ? Math.log2(value) : value) : isLog ? slider.min : slider.max;
    slider.setAttribute('aria-valuetext', control(slider.dataset.of).value || 'by default');
  }
}

export const readSlider = slider => String(slider.dataset.scale === 'log' ? 2 ** Number(slider.value) : Number(slider.value));

// Choices in one text are separate, but for brackets: tp=2, stage_layers=[3,3].
const split = text => text.split(/[,;](?![^[]*\])|\n/).map(each => each.trim()).filter(Boolean);

// The question as the planner takes it (dtlayout/web/question.py).
export function toQuestion(state, more = {}) {
  const {gpu, gpus, gpus_per_node, seq_len, global_batch, engine, max_memory, tokens} = state;
  const question = {gpu, gpus, gpus_per_node, seq_len, global_batch, engine: engine === FIRST.engine ? '' : engine, max_memory, tokens, price: tokens ? state.price : '', model: state.model, why_not: state.why_not};
  question.fix = [...split(state.fix), ...(state.recompute ? [`recompute=${state.recompute}`] : [])];
  question.avoid = split(state.avoid);
  question.precision = state.precision && state.precision !== 'compute' ? [`matmuls=${state.precision}`] : [];
  if (state.file) question.file = state.file;
  return {...question, ...more};
}

// Link: names and values that differ from a fresh page; a file is packed.
export async function toHash(state) {
  const parts = new URLSearchParams();
  for (const name of [...TEXTS, ...STATE]) if (state[name] !== FIRST[name]) parts.set(name, state[name]);
  if (state.file) parts.set('file', `${state.file.name}:${await pack(state.file.text)}`);
  const text = parts.toString();
  return text ? `#${text}` : '';
}

export async function fromHash(hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, '')), state = {...FIRST};
  for (const name of [...TEXTS, ...STATE]) if (parts.has(name)) state[name] = parts.get(name).slice(0, 2000);
  if (parts.has('file')) {
    const [, name, packed] = /^([^:]*):(.*)$/s.exec(parts.get('file')) ?? [];
    try {
      state.file = {name, text: await unpack(packed)};
    } catch {
      state.file = {name: name ?? '', text: ''};  // refused by the planner
    }
  }
  return state;
}

const through = async (data, transform) => new Uint8Array(await new Response(new Blob([data]).stream().pipeThrough(transform)).arrayBuffer());
async function pack(text) {
  const data = await through(new TextEncoder().encode(text), new CompressionStream('deflate-raw'));
  let letters = '';
  for (let i = 0; i < data.length; i += 8192) letters += String.fromCharCode(...data.subarray(i, i + 8192));
  return btoa(letters).replaceAll('+', '-').replaceAll('/', '_').replace(/=+$/, '');
}
const MOST = 400_000;  // letters of a file, as the planner takes them
async function unpack(text) {
  const data = Uint8Array.from(atob(text.replaceAll('-', '+').replaceAll('_', '/')), letter => letter.charCodeAt(0));
  const reader = new Blob([data]).stream().pipeThrough(new DecompressionStream('deflate-raw')).getReader(), parts = [];
  for (let size = 0; size <= 4 * MOST;) {  // a few bytes can be unpacked to gigabytes
    const {done, value} = await reader.read();
    if (done) return new TextDecoder().decode(await new Blob(parts).arrayBuffer());
    size += value.length;
    parts.push(value);
  }
  await reader.cancel();
  throw new Error('too large');
}
