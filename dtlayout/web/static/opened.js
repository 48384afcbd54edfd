// One layout opened: memory by component and rank, its schedule, what would help, and its file.
import {make, fill, wide, number, bytes, decimal, percent, seconds, words, sentence} from './text.js';
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
    bars(shown.map(([i, own, total]) => [ranks.length > 1 ? `pipeline rank ${i}` : 'every rank', own, number(bytes(total), 'peak', `rank ${i} in all`)]), whole, {mark: capacity, say: bytes}),
    shown.length < ranks.length && make('p', {class: 'note'}, `${ranks.length - shown.length} ranks between them are left out.`),
    memoryTable(parts, ranks),
    messages(found),
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
  return numbers('Memory in numbers', table);
}

const SENDS = {tp: 'parts of matmuls', cp: 'keys and values', ep: 'tokens to experts', pp: 'hidden states', dp: 'gradients and weights'};

// What the rank whose step is told sends: bytes by link, and time that is waited for or hidden behind computing.
function messages(found) {
  const rank = found.step_rank, rows = found.messages[rank] ?? [], hasTime = rows.every(each => each.sending_s !== null);
  if (!rows.length) return null;
  const name = each => make('span', {}, make('b', {}, each.axis), ` ${SENDS[each.axis]}`);
  const sent = rows.map(each => ({'fast links': each.fast_link_bytes, network: each.network_bytes}));
  const time = rows.map(each => ({'waited for': Math.min(each.waited_s, each.sending_s), hidden: Math.max(0, each.sending_s - each.waited_s)}));
  const longest = values => Math.max(...values.map(own => Object.values(own).reduce((a, b) => a + b, 0)));
  const chart = (title, parts, text, say) => make('div', {}, make('h4', {}, title), legend(Object.keys(parts[0]), each => parts.some(own => own[each] > 0)),
    bars(rows.map((each, i) => [name(each), parts[i], text(each)]), longest(parts), {say}));
  return [make('h3', {}, found.messages.length > 1 ? `What pipeline rank ${rank} sends in a step` : 'What a rank sends in a step'),
    make('p', {class: 'note'}, 'Fast links join the GPUs of a node, or of a rack. The network joins nodes.'),
    make('div', {class: 'columns', id: 'messages'},
      chart('Bytes by link', sent, each => number(decimal(each.fast_link_bytes + each.network_bytes), `messages.${each.axis}`, `sent along ${each.axis}`), decimal),
      hasTime && chart('Time of sending', time, each => [number(seconds(each.sending_s), `messages.${each.axis}`, `sending along ${each.axis}`), `, ${percent(each.hidden_share)} hidden`], seconds)),
    messageTable(found, hasTime)];
}

function messageTable(found, hasTime) {
  const heads = ['rank', 'axis', 'fast links', 'network', ...(hasTime ? ['time', 'waited for'] : []), 'hidden'];
  const cell = (text, each, what) => make('td', {}, number(text, `messages.${each.axis}`, `${what} along ${each.axis}`));
  return numbers('Messages in numbers', make('table', {},
    make('thead', {}, make('tr', {}, heads.map((name, i) => make('th', {class: i === 1 ? 't' : null}, name)))),
    make('tbody', {}, found.messages.flatMap((rows, rank) => rows.map(each => make('tr', {}, make('td', {}, rank), make('td', {class: 't'}, each.axis),
      cell(decimal(each.fast_link_bytes), each, 'over fast links'), cell(decimal(each.network_bytes), each, 'over the network'),
      hasTime && [cell(seconds(each.sending_s), each, 'sending'), cell(seconds(each.waited_s), each, 'waited for')], cell(percent(each.hidden_share), each, 'hidden')))))));
}

const numbers = (name, table) => make('details', {}, make('summary', {}, 'in numbers'), wide(name, table));

function helps(found, tryIt) {
  const changes = [...found.changes, ...(found.growth ? [found.growth] : []), ...(found.fine_tuning ? [found.fine_tuning] : [])];
  if (!changes.length) return make('p', {class: 'note'}, found.fits ? 'No single change is predicted to be faster.' : 'No single change fits.');
  return wide('Changes that would help', make('table', {},
    make('thead', {}, make('tr', {}, ['change', 'a step', '', 'peak', ''].map((name, i) => make('th', {class: i ? null : 't'}, name)))),
    make('tbody', {}, changes.map(each => {
      const gain = each.step_time_s && found.step_time_s ? 1 - each.step_time_s / found.step_time_s : null;
      return make('tr', {}, make('td', {class: 't prose'}, text(each.overrides)),
        make('td', {}, each.step_time_s ? number(seconds(each.step_time_s), 'step_time_s', 'a step') : 'n/a'),
        make('td', {class: gain > 0 ? 'better' : 'worse'}, gain !== null && number(`${percent(Math.abs(gain), 1)} ${gain > 0 ? 'faster' : 'slower'}`, 'step_time_s', 'gain')),
        make('td', {}, number(bytes(each.peak_memory_bytes), 'peak', 'fullest rank')),
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
