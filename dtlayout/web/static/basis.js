// What the answer rests on: the range, what is assumed, and how many layouts were searched.
import {make, fill, count, percent, words, plural} from './text.js';

export function showBasis(place, answer) {
  const {scenario, searched, asked} = answer, step = scenario.intervals.step_time;
  const assumed = Object.entries(scenario.assumptions.values).map(([name, value]) => `${name} ${value}`).join(', ');
  fill(place,
    make('h2', {}, 'What this rests on'),
    make('p', {}, `The range held for ${percent(step.covered)} of ${step.rows === null ? '' : `${count(step.rows)} `}measured runs: ${step.like}.`,
      scenario.calibrated ? '' : ` No run of ${scenario.engine} on ${scenario.gpu} is known.`),
    make('p', {class: 'note'}, `Assumed of ${scenario.engine}: ${assumed}.`),
    answer.usual && make('p', {class: 'note'}, `${answer.usual.who} has ${answer.usual.layout.name} for ${answer.usual.model} (${answer.usual.where}).`),
    asked.notes.map(note => make('p', {class: 'note'}, note)),
    make('details', {}, make('summary', {}, `${plural(searched.layouts, 'layout')} searched`), make('table', {}, make('tbody', {},
      Object.entries(searched.counts).map(([why, number]) => make('tr', {}, make('td', {}, words(why)), make('td', {}, count(number))))))));
}
