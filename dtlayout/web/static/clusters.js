// Scale: days and money of the whole training against the number of GPUs.
import {make, fill, wide, number, count, digits, percent, plural, billions} from './text.js';
import {curve} from './charts.js';

// Half, twice and so on of the number that is asked about, in whole nodes where it has some.
export function chooseSizes(gpus) {
  const number = Number(gpus);
  if (!Number.isInteger(number) || number < 1 || number > 65536) return [];
  return [...new Set([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8].map(each => Math.round(number * each)))].filter(each => each >= 1);
}

export function showClusters(place, document, answer) {
  const head = make('h2', {}, 'More or fewer GPUs');
  if (!document.ok) {
    fill(place, head, make('ul', {class: 'note'}, document.problems.map(each => make('li', {}, each))));
    return;
  }
  const rows = document.scale.filter(row => row.layout), priced = document.tokens !== undefined;
  const hasMoney = document.price_per_gpu_hour !== null && document.price_per_gpu_hour !== undefined;
  const marksOf = row => Object.entries(document.marks ?? {}).filter(([, gpus]) => gpus === row.num_gpus).map(([name]) => name).join(', ');
  const points = (key, say) => rows.map(row => ({x: row.num_gpus, y: row.cost[key], mark: marksOf(row), text: `${plural(row.num_gpus, 'GPU')}: ${say(row.cost[key])}`}));
  const heads = ['GPUs', 'tokens/s', 'of one GPU', ...(priced ? ['days', ...(hasMoney ? ['money'] : []), 'GPU-hours', ''] : [])];
  const cell = (text, origin, row) => make('td', {}, number(text, origin, plural(row.num_gpus, 'GPU')));
  const cost = hasMoney ? 'money' : 'gpu_hours';
  fill(place, head,
    priced && answer?.cost && make('p', {class: 'lead'}, `${billions(document.tokens)} tokens on ${plural(answer.scenario.num_gpus, 'GPU')}: `,
      number(`${digits(answer.cost.days)} days`, 'cost'), [', ', number(`${digits(answer.cost.days_range[0])} to ${digits(answer.cost.days_range[1])}`, 'range', 'range of days'), ' in the range'],
      hasMoney ? [', ', number(count(answer.cost.money), 'cost', 'money')] : [', ', number(`${count(answer.cost.gpu_hours)} GPU-hours`, 'cost')],
      hasMoney ? ` at ${document.price_per_gpu_hour} a GPU-hour.` : '.'),
    !rows.length && make('p', {}, 'No layout is legal and fits on any of these clusters.'),
    priced && rows.length > 1 && make('div', {class: 'columns'},
      make('div', {}, make('h3', {}, 'Days'), curve(points('days', value => `${digits(value)} days`), {name: 'Days of the training against GPUs'})),
      make('div', {}, make('h3', {}, hasMoney ? 'Money' : 'GPU-hours'), curve(points(cost, count), {name: 'Cost of the training against GPUs', isLinear: true}))),
    wide('Clusters', make('table', {},
      make('thead', {}, make('tr', {}, [...heads, 'layout'].map((name, i) => make('th', {class: i === heads.length ? 't' : null}, name)))),
      make('tbody', {}, document.scale.map(row => make('tr', {}, make('td', {}, count(row.num_gpus)),
        row.layout
          ? [cell(count(row.layout.tokens_per_s), 'tokens_per_s', row), cell(percent(row.efficiency), 'efficiency', row),
            priced && [cell(digits(row.cost.days), 'cost', row), hasMoney && cell(count(row.cost.money), 'cost', row), cell(count(row.cost.gpu_hours), 'cost', row), make('td', {class: 't'}, marksOf(row))],
            make('td', {class: 't'}, row.layout.name)]
          : make('td', {class: 't', colspan: heads.length}, 'nothing is legal and fits')))))),
    make('p', {class: 'note'}, 'On the same batch; steps alone, without restarts. The knee is where more GPUs begin to cost more than they save.'));
}
