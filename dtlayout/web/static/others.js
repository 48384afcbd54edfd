// Why not another one: other choices beside the best, a layout that is asked about, and two side by side.
import {make, fill, wide, number, bytes, count, percent, seconds, words, sentence} from './text.js';
import {bars, legend} from './charts.js';

const IMPOSSIBLE = ['not legal', 'does not fit', 'too full'];

export function showOthers(place, answer, state, {whyNot, compare}) {
  const best = answer.layouts[0], {against, why_not} = answer;
  const possible = against.filter(each => !IMPOSSIBLE.includes(each.outcome) && each.step_time_s).sort((a, b) => a.step_time_s - b.step_time_s);
  const impossible = against.filter(each => !possible.includes(each));
  const field = make('input', {id: 'why_not', value: state.why_not, placeholder: 'such as tp=4, pp=4, mb=2'});
  const longest = Math.max(best.step_time_s, ...possible.map(each => each.step_time_s));
  fill(place,
    make('h2', {}, 'Why not another one?'),
    make('form', {class: 'ask-line', 'aria-label': 'Why not', onsubmit: event => { event.preventDefault(); whyNot(field.value.trim()); }},
      make('div', {class: 'field', 'data-field': 'why_not'}, make('label', {for: 'why_not'}, 'Why not a layout with'), field),
      make('div', {class: 'actions'}, make('button', {type: 'submit', id: 'ask-why-not'}, 'Ask'), state.why_not && make('button', {type: 'button', onclick: () => whyNot('')}, 'Clear'))),
    why_not && describeWhyNot(why_not, compare),
    possible.length > 0 && [make('p', {class: 'note'}, 'Each bar is a step of the best layout with that one choice. The mark is the step of the best.'),
      bars(possible.map(each => [make('button', {type: 'button', class: 'plain', 'aria-label': `Compare with ${each.change}`, onclick: () => compare(each.name)}, each.change), {step: each.step_time_s}, [`×${(best.step_time_s / each.step_time_s).toFixed(2)}, `, number(seconds(each.step_time_s), 'step_time_s', 'a step')]]), longest, {mark: best.step_time_s, say: seconds}),
      make('details', {}, make('summary', {}, 'in words'), make('ul', {}, possible.map(each => make('li', {}, `${each.change}, as ${each.name}: ${sentence(each.problems[0])}`))))],
    impossible.length > 0 && make('details', {}, make('summary', {}, `${impossible.length} choices that are not legal or too large`),
      make('ul', {}, impossible.map(each => make('li', {}, `${each.change}: ${each.outcome}, ${sentence(each.problems[0])}`)))),
    chooser(answer, compare),
    make('div', {id: 'compared'}));
}

function describeWhyNot(found, compare) {
  const better = found.best_with_these_choices ?? found.best_with_other_recompute;
  return make('div', {id: 'why-not-answer'},
    make('p', {class: 'lead'}, `${found.name}: ${found.outcome}.`),
    make('ul', {}, found.problems.map(each => make('li', {}, sentence(each)))),
    better && make('p', {}, `The best with these choices is ${better.name}, ${seconds(better.step_time_s)} a step. `,
      make('button', {type: 'button', class: 'plain', onclick: () => compare(better.name)}, 'Set it beside the best')));
}

function chooser(answer, compare) {
  const names = [...new Set([...answer.layouts.slice(1), ...(answer.usual ? [answer.usual.layout] : []), ...answer.against.filter(each => each.step_time_s)].map(each => each.name))];
  const select = make('select', {id: 'beside'}, names.map(name => make('option', {value: name}, answer.usual?.layout.name === name ? `${name} (${answer.usual.who})` : name)));
  return names.length > 0 && make('div', {class: 'ask-line'},
    make('div', {class: 'field'}, make('label', {for: 'beside'}, 'Beside the opened layout'), select),
    make('div', {class: 'actions'}, make('button', {type: 'button', onclick: () => compare(select.value)}, 'Compare')));
}

export function showCompared(place, document, names, isAsked) {
  if (!document.ok) {
    fill(place, make('ul', {class: 'problem'}, document.problems.map(each => make('li', {}, each))));
    return;
  }
  const sides = document.compared, times = sides.map(each => each.time_s ?? {}), memories = sides.map(each => each.memory_bytes);
  const longest = Math.max(...times.map(total)), fullest = Math.max(...sides.map(each => Math.max(each.peak_memory_bytes, each.capacity_bytes)));
  fill(place,
    make('h3', {tabindex: '-1', id: 'compared-title'}, 'Side by side'),
    make('p', {class: 'note'}, names.map((name, i) => `${i + 1}: ${name}${sides[i].fits ? '' : ', which does not fit'}`).join('; '), '.'),
    make('div', {class: 'columns'},
      make('div', {}, legend(Object.keys(times[0]), each => times.some(own => own[each] > 0)),
        longest > 0 && bars(times.map((own, i) => [String(i + 1), own, number(seconds(total(own)), 'step_time_s', `a step of ${i + 1}`)]), longest, {say: seconds}), difference('step', times, seconds, 'time')),
      make('div', {}, legend(Object.keys(memories[0]), each => memories.some(own => own[each] > 0)),
        bars(memories.map((own, i) => [String(i + 1), own, number(bytes(sides[i].peak_memory_bytes), 'peak', `fullest rank of ${i + 1}`)]), fullest, {mark: sides[0].capacity_bytes, say: bytes}), difference('fullest rank', memories, bytes, 'memory'))),
    make('p', {}, conclude(sides)));
  if (isAsked) place.querySelector('#compared-title').focus();
}

const total = parts => Object.values(parts).reduce((a, b) => a + b, 0);

function difference(title, [one, other], say, kind) {
  const used = Object.keys(one).filter(name => one[name] > 0 || other[name] > 0);
  const signed = value => `${value > 0 ? '+' : '−'}${say(Math.abs(value))}`;
  return wide(`Difference of the ${title}`, make('table', {}, make('thead', {}, make('tr', {}, [title, '1', '2', '2 − 1'].map(each => make('th', {}, each)))),
    make('tbody', {}, used.map(name => make('tr', {}, make('td', {}, words(name)), [one, other].map((each, i) => make('td', {}, number(say(each[name]), `${kind}.${name}`, `${words(name)} of ${i + 1}`))), make('td', {}, other[name] !== one[name] && number(signed(other[name] - one[name]), `${kind}.${name}`, `${words(name)}, 2 less 1`)))))));
}

function conclude([one, other]) {
  if (!one.tokens_per_s_per_gpu || !other.tokens_per_s_per_gpu) return '';
  const change = other.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu - 1;
  return `2 trains ${percent(Math.abs(change), 1)} ${change > 0 ? 'more' : 'fewer'} tokens a second, ${count(other.tokens_per_s_per_gpu)} on a GPU beside ${count(one.tokens_per_s_per_gpu)}.`;
}
