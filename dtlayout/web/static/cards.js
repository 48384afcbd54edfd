// The best layouts as cards: speed and range, memory of the fullest rank, what the step is spent on.
import {make, fill, number, bytes, count, short, percent, seconds, words, sentence, billions, describeLayout} from './text.js';
import {track, legend} from './charts.js';

export function showBest(place, answer, {opened, open, emit, patch}) {
  const {scenario, layouts} = answer, best = layouts[0];
  const names = Object.keys(best.time), parts = Object.keys(best.memory[0]);
  const hasTime = scenario.knows_time;
  fill(place,
    make('h2', {}, `${scenario.model.name} (${billions(scenario.parameters)}) on ${count(scenario.num_gpus)} × ${scenario.gpu}`),
    answer.yours && showYours(answer.yours, best, patch),
    legendLine('step', names, name => layouts.some(each => each.time[name] > 0)),
    legendLine('memory', parts, name => layouts.some(each => each.memory[each.busiest_rank][name] > 0), 'what a GPU may hold', 'range of the peak'),
    make('ul', {class: 'cards'}, layouts.map((each, i) => card(each, i, {hasTime, names, parts, isOpen: each.name === opened, open, emit}))),
    showFacts(answer));
}

// The answer in three sentences: which layout, how fast, does it fit, and why not the next one.
export function showVerdict(place, {layouts: [best], scenario}) {
  const low = best.peak_range_bytes[1] > best.capacity_bytes ? 'It fits if the prediction holds: ' : 'It fits: ';
  fill(place,
    make('p', {class: 'lead'}, 'Best: ', make('b', {}, best.name), '. ',
      scenario.knows_time && [number(count(best.tokens_per_s), 'tokens_per_s', 'tokens a second'), ' tokens/s, ', number(seconds(best.step_time_s), 'step_time_s', 'a step'), ' a step. '],
      low, number(bytes(best.peak_bytes), 'peak', 'fullest GPU'), ' of ', number(bytes(best.capacity_bytes), 'capacity', 'capacity'), ' on its fullest GPU.'),
    make('p', {}, describeLayout(best.layout), best.why && ` Why: ${best.why.replace(/ than 2\b/, ' than layout 2')}.`));
}

function legendLine(title, names, used, mark = '', range = '') {
  const keys = legend(names, used, mark);
  keys.prepend(make('b', {}, title));
  if (range) keys.append(make('span', {}, make('i', {class: 'range-key'}), range));
  return keys;
}

function card(each, i, {hasTime, names, parts, isOpen, open, emit}) {
  const memory = each.memory[each.busiest_rank], [low, high] = each.step_time_range_s;
  const whole = Math.max(each.capacity_bytes, each.peak_range_bytes[1]);
  const gpus = each.tokens_per_s / each.tokens_per_s_per_gpu;
  const tokens = each.tokens_per_s * each.step_time_s;
  const spent = names.filter(name => each.time[name] / each.step_time_s >= .005).sort((a, b) => each.time[b] - each.time[a]);
  const share = name => percent(each.time[name] / each.step_time_s, each.time[name] / each.step_time_s < .095 ? 1 : 0);
  return make('li', {class: isOpen ? 'card is-open' : 'card', 'data-layout': each.name},
    make('h3', {}, make('span', {class: 'place'}, i + 1), each.name),
    make('p', {class: 'note words'}, describeLayout(each.layout)),
    hasTime
      ? [make('p', {class: 'speed'}, number(count(each.tokens_per_s), 'tokens_per_s', 'tokens a second'), make('small', {}, ' tokens/s')),
        make('p', {class: 'note'}, number(`${short(tokens / high)} to ${short(tokens / low)}`, 'range', 'range of tokens a second'),
          ' · ', number(count(each.tokens_per_s_per_gpu), 'tokens_per_s', 'tokens a second of one GPU'), ` on each of ${count(gpus)}`,
          each.mfu !== null && [' · ', number(`${percent(each.mfu, 1)} MFU`, 'mfu')])]
      : make('p', {class: 'note'}, 'No seconds are known of this machine; what is compared are shares of the step.'),
    make('div', {class: 'row'}, make('span', {}, 'a step ', hasTime && number(seconds(each.step_time_s), 'step_time_s', 'a step')),
      make('span', {class: 'split'}, spent.slice(0, 3).map((name, k) => [k ? ', ' : '', `${words(name)} `, number(share(name), `time.${name}`, words(name))]))),
    track(each.time, each.step_time_s, {say: value => percent(value / each.step_time_s, 1)}),
    make('div', {class: 'row'}, make('span', {}, 'fullest rank ', number(bytes(each.peak_bytes), 'peak', 'fullest rank')),
      make('span', {class: 'split'}, 'of ', number(bytes(each.capacity_bytes), 'capacity', 'capacity'))),
    track(memory, whole, {mark: each.capacity_bytes, range: each.peak_range_bytes, say: bytes}),
    each.why && make('p', {class: 'note'}, sentence(each.why)),
    make('div', {class: 'actions'},
      make('button', {type: 'button', 'aria-pressed': String(isOpen), onclick: () => open(each.name)}, isOpen ? 'Opened below' : 'Open'),
      make('button', {type: 'button', class: i ? null : 'main', onclick: () => emit(each.name)}, 'Get its file')));
}

function showYours(yours, best, patch) {
  if (!yours.layout) {
    return make('div', {class: 'yours'},
      make('p', {class: 'lead'}, `The layout of your file does not fit these GPUs: ${yours.misfits.join('; ')}.`));
  }
  const slower = yours.slower_than_best;
  const beside = Math.abs(slower) < .005 ? 'as fast as the best here' : slower > 0 ? `${percent(slower, 1)} slower than the best here` : `${percent(-slower, 1)} faster than the best here`;
  return make('div', {class: 'yours'},
    make('p', {class: 'lead'}, `${yours.path ?? 'Your file'}: ${yours.layout.name}, ${yours.fits ? `fits, ${bytes(yours.layout.peak_bytes)} on its fullest rank; ${beside}` : `does not fit: ${bytes(yours.layout.peak_bytes)} of ${bytes(best.capacity_bytes)}`}.`),
    yours.change && [make('p', {}, 'The best as changes of the file:'), make('pre', {}, yours.change.join('\n')),
      make('div', {class: 'actions'}, make('button', {type: 'button', onclick: patch}, 'Get the changed file'))]);
}

function showFacts(answer) {
  const facts = [];
  const {alike, simplest, margin} = answer;
  if (alike && alike.places > 1) {
    facts.push(`Places 1 to ${alike.places} cannot be told apart: layouts predicted within ${percent(alike.most)} of each other came in the predicted order ${Math.round(100 * alike.right / alike.pairs)} of 100 times.`);
  }
  if (simplest && simplest.places > 1 && simplest.slower_than_fastest >= .0005) facts.push(`1 is the simplest of places 1 to ${simplest.places}, ${percent(simplest.slower_than_fastest, 1)} slower than the fastest of them.`);
  if (!margin.is_asked && margin.max_memory < 1) facts.push(`${percent(margin.max_memory)} of the memory may be filled: ${margin.why}.`);
  facts.push(...answer.remarks.map(sentence));
  return make('div', {}, facts.map(each => make('p', {class: 'note'}, each)));
}
