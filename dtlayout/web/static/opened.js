// One layout opened: memory by component and rank, its schedule, what would help, and its file.
import {make, fill, number, bytes, percent, seconds, words, sentence} from './text.js';
import {bars, legend, timeline} from './charts.js';

const MOST_RANKS = 16;
const text = overrides => overrides.map(each => each.replace(/^--(layout|kernels)\./, '').replace(/^--/, '')).join(', ');

export function showOpened(place, name, found, {emit, tryIt}) {
  const capacity = found.capacity_bytes, ranks = found.memory_bytes.map(({total, ...parts}) => [parts, total]);
  const parts = Object.keys(ranks[0][0]);
  const whole = Math.max(capacity, ...ranks.map(([, total]) => total));
  const shown = ranks.length > MOST_RANKS ? ranks.map((each, i) => [i, ...each]).filter(([i]) => i < MOST_RANKS / 2 || i >= ranks.length - MOST_RANKS / 2) : ranks.map((each, i) => [i, ...each]);
  fill(place,
    make('h2', {tabindex: '-1'}, `Opened: ${name}`),
    make('div', {class: 'actions'}, make('button', {type: 'button', class: 'main', onclick: () => emit(name)}, 'Get its file'),
      make('span', {class: 'note', id: 'bound'}, describeLimit(found))),
    make('div', {id: 'emitted'}),
    make('h3', {}, ranks.length > 1 ? 'Memory of each pipeline rank' : 'Memory of each rank'),
    legend(parts, each => ranks.some(([own]) => own[each] > 0), `capacity, ${bytes(capacity)}`),
    bars(shown.map(([i, own, total]) => [ranks.length > 1 ? `pipeline rank ${i}` : 'every rank', own, bytes(total)]), whole, {mark: capacity, say: bytes}),
    shown.length < ranks.length && make('p', {class: 'note'}, `${ranks.length - shown.length} ranks between them are left out.`),
    memoryTable(parts, ranks),
    make('h3', {id: 'timeline-title', hidden: true}, 'When each pipeline rank does what'), make('div', {id: 'timeline'}),
    make('h3', {}, 'What would make it faster or fit'),
    helps(found, tryIt));
}

function describeLimit(found) {
  const {limit} = found;
  if (limit.kind === 'memory') return `Bound by memory: ${words(limit.component)}, ${percent(limit.share)} of the peak on pipeline rank ${limit.pipeline_rank}.`;
  if (limit.kind === 'host memory') return `Bound by the host's memory, ${percent(limit.share)} of what it has.`;
  return `Bound by ${words(limit.component)}: ${percent(limit.share, 1)} of the step.`;
}

function memoryTable(parts, ranks) {
  const used = parts.filter(each => ranks.some(([own]) => own[each] > 0));
  const table = make('table', {},
    make('thead', {}, make('tr', {}, make('th', {}, 'rank'), used.map(each => make('th', {}, words(each))), make('th', {}, 'in all'))),
    make('tbody', {}, ranks.map(([own, total], i) => make('tr', {}, make('td', {}, i),
      used.map(each => make('td', {}, number(bytes(own[each]), `memory.${each}`, `${words(each)} of rank ${i}`))), make('td', {}, number(bytes(total), 'peak', `rank ${i} in all`))))));
  return make('details', {}, make('summary', {}, 'in numbers'), make('div', {class: 'wide', role: 'region', tabindex: '0', 'aria-label': 'Memory in numbers'}, table));
}

function helps(found, tryIt) {
  const changes = [...found.changes, ...(found.growth ? [found.growth] : []), ...(found.fine_tuning ? [found.fine_tuning] : [])];
  if (!changes.length) return make('p', {class: 'note'}, found.fits ? 'No single change is predicted to be faster.' : 'No single change fits.');
  return make('div', {class: 'wide', role: 'region', tabindex: '0', 'aria-label': 'Changes that would help'}, make('table', {},
    make('thead', {}, make('tr', {}, ['change', 'a step', '', 'peak', ''].map((name, i) => make('th', {class: i ? null : 't'}, name)))),
    make('tbody', {}, changes.map(each => {
      const gain = each.step_time_s && found.step_time_s ? 1 - each.step_time_s / found.step_time_s : null;
      return make('tr', {}, make('td', {class: 't prose'}, text(each.overrides)),
        make('td', {}, each.step_time_s ? seconds(each.step_time_s) : 'n/a'),
        make('td', {class: gain > 0 ? 'better' : 'worse'}, gain === null ? '' : `${percent(Math.abs(gain), 1)} ${gain > 0 ? 'faster' : 'slower'}`),
        make('td', {}, bytes(each.peak_memory_bytes)),
        make('td', {}, each.overrides.every(one => /^--(layout|kernels)\./.test(one)) && make('button', {type: 'button', class: 'plain', 'aria-label': `Ask with ${text(each.overrides)}`, onclick: () => tryIt(each)}, 'ask with it')));
    }))));
}

export function showTimeline(place, found) {
  const title = place.querySelector('#timeline-title'), box = place.querySelector('#timeline');
  if (!found || found.problems) return;
  title.hidden = false;
  const perRank = found.layout ? found.ranks.length : 1;
  fill(box,
    make('p', {class: 'note'}, `${percent(found.bubble, 1)} of the pipeline's time is waiting`, found.pipeline_s ? `, of ${seconds(found.pipeline_s)}.` : '.', ' A number is a microbatch; a rank\'s further stages are pale.'),
    timeline(found, perRank));
}

export function showEmitted(place, emitted, commands, copy) {
  const url = URL.createObjectURL(new Blob([emitted.text], {type: 'text/plain'}));
  fill(place,
    make('h3', {tabindex: '-1', id: 'emitted-title'}, emitted.emitted_for ? `${emitted.name}, for ${emitted.emitted_for.program}` : emitted.name),
    make('div', {class: 'actions'}, make('a', {class: 'main', href: url, download: emitted.name, id: 'download'}, `Download ${emitted.name}`),
      make('button', {type: 'button', onclick: () => copy(emitted.text, 'The file')}, 'Copy it'),
      make('button', {type: 'button', onclick: () => copy(commands.at(-1), 'The command')}, 'Copy the command that writes it')),
    (emitted.emitted_for?.gaps ?? []).map(gap => make('p', {class: 'note'}, `What it cannot say: ${sentence(gap)}`)),
    make('pre', {tabindex: '0', 'aria-label': `Text of ${emitted.name}`}, emitted.diff ?? emitted.text));
  place.querySelector('#emitted-title').focus();
}
