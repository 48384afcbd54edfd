// Where a number comes from: its meaning, its formula, and each constant with its source.
import {make, fill, wide, digits} from './text.js';

const value = each => Math.abs(each.value) >= 1e6 || (each.value !== 0 && Math.abs(each.value) < 1e-3) ? each.value.toExponential(3) : digits(each.value);

export function showOrigin(dialog, document, key, text) {
  const found = document.parts[key];
  if (!found) return;
  const rows = found.constants.map(each => make('tr', {},
    make('td', {}, each.name), make('td', {}, value(each)), make('td', {class: 't'}, each.unit),
    make('td', {class: 't prose'}, each.source), make('td', {class: 't prose'}, each.meaning)));
  fill(dialog,
    make('h2', {id: 'origin-title'}, `Where ${text} comes from`),
    make('p', {}, found.meaning),
    make('code', {}, found.formula),
    rows.length > 0 && wide('Constants', make('table', {},
      make('thead', {}, make('tr', {}, ['constant', 'value', 'unit', 'source', 'meaning'].map((name, i) => make('th', {class: i === 1 ? null : 't'}, name)))),
      make('tbody', {}, rows))),
    make('p', {class: 'note'}, `Program ${document.engine}: ${document.engine_source}.`),
    key.includes('.') && make('p', {class: 'note'}, `Symbols: ${document.symbols}.`),
    make('p', {class: 'note'}, `Derived in ${found.page}.`),
    make('div', {class: 'actions'}, make('button', {type: 'button', class: 'main', autofocus: true, onclick: () => dialog.close()}, 'Close')));
  dialog.showModal();
}
