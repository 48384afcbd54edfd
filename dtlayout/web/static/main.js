// The page: controls become a question while one types, and its answer replaces the one before.
import {ask} from './ask.js';
import {Latest} from './latest.js';
import {make, seconds, plural, billions, bytes} from './text.js';
import {FIRST, readControls, writeControls, moveSliders, readSlider, toQuestion, toHash, fromHash} from './question.js';
import {showBest, showVerdict} from './cards.js';
import {showOpened, showTimeline, showEmitted} from './opened.js';
import {showOthers, showCompared} from './others.js';
import {chooseSizes, showClusters} from './clusters.js';
import {showBasis} from './basis.js';
import {showOrigin} from './origin.js';

const byId = id => document.getElementById(id);
const WAIT_MS = 180;  // after the last key
let state = {...FIRST}, answer = null, answered = null, choices = null, round = 0, timer = 0, origins = null, scaleWanted = false;

const latest = new Latest(({began, ...question}) => ask(question), {
  began: () => { age(true); byId('status').textContent = 'Searching…'; },
  done: (document, question) => showAnswer(document, question),
  failed: error => showProblems([error.message], ['']),
});

function refresh(wait = 0) {
  clearTimeout(timer);
  timer = setTimeout(async () => {
    state = readControls(state);
    moveSliders();
    describeNodes();
    round += 1;
    age(true);
    latest.put({began: performance.now(), ...toQuestion(state)});
    const hash = await toHash(state);
    if (hash !== location.hash) history.replaceState(null, '', hash || location.pathname + location.search);
  }, wait);
}

function showAnswer(document, {began, ...question}) {
  if (!document.ok) {
    byId('status').textContent = answer ? 'Refused; below is still the answer before.' : 'Refused.';
    byId('found').setAttribute('aria-busy', 'false');
    showProblems(document.problems, document.fields);
    return;
  }
  showProblems([], []);
  answer = document;
  answered = question;
  origins = null;
  const names = document.layouts.map(each => each.name);
  if (!names.includes(state.layout)) state.layout = '';
  byId('status').textContent = `${plural(document.searched.layouts, 'layout')} searched in ${seconds((performance.now() - began) / 1000)}.`;
  age(false);
  byId('found').dataset.asked = JSON.stringify(document.asked.commands);
  window.document.title = `${document.layouts[0].name}: ${document.scenario.model.name} on ${document.scenario.num_gpus} × ${document.scenario.gpu}`;
  showVerdict(byId('verdict'), document);
  draw();
  openLayout();
  byId('clusters').replaceChildren(make('h2', {}, 'More or fewer GPUs'), make('p', {class: 'note'}, 'Comes when it is in sight.'));
  if (scaleWanted) askScale();
}

// Dims what answers an earlier question.
function age(isOld) {
  for (const id of ['found', 'verdict']) byId(id).classList.toggle('old', isOld);
  byId('found').setAttribute('aria-busy', String(isOld));
}

function draw() {
  const opened = nameOpened(), focused = document.activeElement?.id;
  showBest(byId('best'), answer, {opened, open, emit, patch});
  showOthers(byId('others'), answer, state, {whyNot, compare});
  showBasis(byId('basis'), answer);
  if (focused && document.activeElement === document.body) byId(focused)?.focus({preventScroll: true});
  if (state.other) compare(state.other, false);
}

const nameOpened = () => state.layout || answer.layouts[0].name;

// Asks beside the answer that is shown; what comes after a newer question was put, or something else was asked, is dropped.
async function askBeside(more, show, isWanted = () => true) {
  const own = round;
  try {
    const document = await ask({...answered, why_not: '', ...more});
    if (own === round && isWanted()) show(document);
  } catch (error) {
    if (own === round) showProblems([error.message], ['']);
  }
}

function open(name) {
  state.layout = name === answer.layouts[0].name ? '' : name;
  draw();
  openLayout(true);
  keepLink();
}

async function openLayout(isAsked = false) {
  const name = nameOpened(), own = round, place = byId('opened'), isWanted = () => name === nameOpened();
  await askBeside({ask: 'explain', layout: name}, document => {
    if (!document.ok) {
      place.replaceChildren(make('h2', {}, `Opened: ${name}`), make('ul', {class: 'note'}, document.problems.map(each => make('li', {}, each))));
      return;
    }
    showOpened(place, name, document, {emit, tryIt});
    if (isAsked) place.querySelector('h2').focus();
  }, isWanted);
  if (own === round && answer.layouts.find(each => each.name === name).layout.pp > 1) {
    await askBeside({ask: 'timeline', layout: name}, document => showTimeline(place, document), isWanted);
  }
}

const emit = name => write({ask: 'emit', layout: name === answer.layouts[0].name ? '' : name});
const patch = () => write({ask: 'patch'});

// Shows a file that was written, to be downloaded or copied.
function write(more) {
  askBeside(more, document => {
    if (!document.ok) {
      showProblems(document.problems, document.fields);
      return;
    }
    let place = byId('emitted');
    if (!place) {
      place = make('div', {id: 'emitted'});
      byId('opened').prepend(place);
    }
    showEmitted(place, document, document.asked.commands, copy);
    place.scrollIntoView({block: 'nearest'});
  });
}

function tryIt(change) {
  const wanted = change.overrides.map(each => each.replace(/^--(layout|kernels)\./, ''));
  const names = wanted.map(each => each.split('=')[0]);
  const kept = byId('fix').value.split(',').map(each => each.trim()).filter(each => each && !names.includes(each.split('=')[0]));
  byId('fix').value = [...kept, ...wanted].join(', ');
  byId('recompute').value = names.includes('recompute') ? '' : byId('recompute').value;
  state.layout = '';
  refresh();
  byId('fix').focus();
}

function whyNot(text) {
  state.why_not = text;
  refresh();
}

function compare(other, isAsked = true) {
  const name = nameOpened();
  state.other = other;
  askBeside({ask: 'compare', layout: name, other}, document => showCompared(byId('compared'), document, [name, other], isAsked),
    () => state.other === other && name === nameOpened());
  if (isAsked) keepLink();
}

async function keepLink() {
  history.replaceState(null, '', (await toHash(state)) || location.pathname + location.search);
}

function askScale() {
  const sizes = chooseSizes(answer.scenario.num_gpus), place = byId('clusters');
  if (!sizes.length) return;
  place.setAttribute('aria-busy', 'true');
  askBeside({ask: 'scale', scale: sizes.join(','), gpus: ''}, document => {
    place.setAttribute('aria-busy', 'false');
    showClusters(place, document, answer);
  });
}

function showProblems(problems, fields) {
  for (const old of document.querySelectorAll('form .problem')) old.remove();
  for (const control of document.querySelectorAll('[aria-invalid]')) {
    control.removeAttribute('aria-invalid');
    control.removeAttribute('aria-describedby');
  }
  const general = [];
  problems.forEach((text, i) => {
    const field = document.querySelector(`.field[data-field="${CSS.escape(fields[i] || '-')}"]`);
    if (!field) {
      general.push(text);
      return;
    }
    const control = field.querySelector('select, input'), id = `${control.id}-problem`;
    control.setAttribute('aria-invalid', 'true');
    control.setAttribute('aria-describedby', id);
    field.append(make('p', {class: 'problem', id}, text));
    if (byId('more').contains(field)) byId('more').open = true;
  });
  byId('problems').replaceChildren(...general.map(text => make('p', {}, text, ' ', suggestion(text))));
}

// A refusal that names what would fit can be taken at its word.
function suggestion(text) {
  const found = /--fix (\S+)/.exec(text);
  return found ? make('button', {type: 'button', class: 'plain', onclick: () => { byId('fix').value = [byId('fix').value, found[1]].filter(Boolean).join(', '); refresh(); }}, `ask with ${found[1]}`) : '';
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    byId('copied').textContent = `${what} is copied.`;
  } catch {
    byId('copied').replaceChildren(`${what}: `, make('code', {}, text));
  }
}

function describeNodes() {
  const gpu = choices?.gpus.find(each => each.name === state.gpu), gpus = Number(state.gpus), node = Number(state.gpus_per_node || gpu?.gpus_per_node);
  byId('gpus_per_node').placeholder = gpu ? String(gpu.gpus_per_node) : '';
  byId('nodes').textContent = gpus > node && node > 0 && Number.isInteger(gpus) ? `${plural(Math.ceil(gpus / node), 'node')} of ${plural(node, 'GPU')}` : '';
}

async function takeFile(file) {
  if (!file) return;
  const name = file.name.replace(/[^A-Za-z0-9._-]/g, '_').replace(/^[._-]+/, '') || 'file';
  state = {...readControls(state), file: {name: name.slice(0, 80), text: await file.slice(0, 1_000_000).text()}};
  const isModel = name.endsWith('.json');
  state.model = '';
  if (!isModel) Object.assign(state, {engine: '', gpus: '', gpus_per_node: '', seq_len: '', global_batch: '', fix: '', recompute: '', precision: 'compute'});
  writeControls(state);
  refresh();
}

function fillChoices() {
  const option = (value, text) => new Option(text, value);
  byId('model').replaceChildren(option('', 'that of the file'), ...choices.models.map(each => option(each.name, `${each.name} (${billions(each.parameters)})`)));
  byId('gpu').replaceChildren(...choices.gpus.map(each => option(each.name, `${each.name} (${bytes(each.memory_bytes)})`)));
  const own = choices.engines.filter(each => each.is_own), written = choices.engines.filter(each => each.program), rest = choices.engines.filter(each => !each.is_own && !each.program);
  byId('engine').replaceChildren(option('', 'that of the file'), ...own.map(each => option(each.name, `${each.name}, our own trainer`)), ...written.map(each => option(each.name, each.program)), ...rest.map(each => option(each.name, `${each.name} (predicted alone)`)));
  byId('precision').replaceChildren(...choices.matmuls.map(each => option(each, each === 'compute' ? 'bfloat16' : each)));
  byId('recompute').replaceChildren(option('', 'whatever is best'), ...['none', 'selective', 'full', 'every-2', 'every-4'].map(each => option(each, each)));
}

byId('question').addEventListener('input', event => {
  const slider = event.target.closest('input[data-of]');
  if (slider) byId(slider.dataset.of).value = readSlider(slider);
  if (event.target.id === 'file') return;
  refresh(event.target.tagName === 'SELECT' ? 0 : WAIT_MS);
});
byId('question').addEventListener('submit', event => event.preventDefault());
byId('file').addEventListener('change', event => { takeFile(event.target.files[0]); event.target.value = ''; });
byId('given').querySelector('button').addEventListener('click', () => {
  state = {...readControls(state), file: null};
  for (const name of ['model', 'engine', 'gpus', 'seq_len', 'global_batch']) state[name] ||= FIRST[name];
  writeControls(state);
  refresh();
});
for (const kind of ['dragover', 'dragleave', 'drop']) {
  document.addEventListener(kind, event => {
    event.preventDefault();
    document.body.classList.toggle('dropping', kind === 'dragover');
    if (kind === 'drop') takeFile(event.dataTransfer.files[0]);
  });
}
byId('skip').addEventListener('click', () => byId('answer').focus());
byId('more').open = matchMedia('(min-width: 62em)').matches;
byId('copy-link').addEventListener('click', () => copy(location.href, 'The link'));
byId('copy-command').addEventListener('click', () => answer && copy(answer.asked.commands[0], 'The command'));
document.addEventListener('click', async event => {
  const pressed = event.target.closest('.number');
  if (!pressed) return;
  const show = () => showOrigin(byId('origin'), origins, pressed.dataset.origin, pressed.textContent);
  if (origins) show();
  else await askBeside({ask: 'origins'}, document => { if (document.ok) { origins = document; show(); } });
});
new IntersectionObserver(entries => {
  scaleWanted = entries.some(each => each.isIntersecting);
  if (scaleWanted && answer && !byId('clusters').querySelector('table')) askScale();
}, {rootMargin: '200px'}).observe(byId('clusters'));

async function load() {
  state = await fromHash(location.hash);
  writeControls(state);
  refresh();
}
addEventListener('hashchange', load);

try {
  choices = await ask({ask: 'choices'});
  fillChoices();
  await load();
} catch (error) {
  showProblems([error.message], ['']);
  byId('status').textContent = '';
}
