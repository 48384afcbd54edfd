// Tables that sort by a press on a heading, and filters above them: words, and conditions such as tp=2 or mfu>40.
const readNumber = text => /^[×+]?-?[\d.,]+( ?(%|[a-zA-Z]+))?$/.test(text) ? parseFloat(text.replace(/[×+,]/g, '')) : NaN;
const nameColumn = heading => heading.split(',')[0].trim().toLowerCase().replace(/\s+/g, '_');
const operators = {
  '=': (a, b) => a === b, '!=': (a, b) => a !== b,
  '>': (a, b) => a > b, '<': (a, b) => a < b, '>=': (a, b) => a >= b, '<=': (a, b) => a <= b,
};

function sortBy(table, column) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const rows = [...body.rows].map(row => [row, row.cells[column].textContent]);
  const isNumeric = rows.some(([, text]) => !isNaN(readNumber(text)));
  const before = heads[column].getAttribute('aria-sort');
  const order = before === 'descending' || (before === 'none' && !isNumeric) ? 'ascending' : 'descending';
  heads.forEach((head, i) => head.setAttribute('aria-sort', i === column ? order : 'none'));
  const sign = order === 'ascending' ? 1 : -1;
  const isEmpty = text => isNumeric ? isNaN(readNumber(text)) : text === '';
  rows.sort(([, a], [, b]) => isEmpty(a) || isEmpty(b) ? isEmpty(a) - isEmpty(b)
    : sign * (isNumeric ? readNumber(a) - readNumber(b) : a.localeCompare(b)));
  body.append(...rows.map(([row]) => row));
}

// What a word of a filter asks of a row's cells; an error is a sentence about a column that is not there.
function parseWord(word, names) {
  const parts = word.match(/^([^=<>!]+)(>=|<=|!=|=|>|<)(.+)$/);
  if (!parts) return cells => cells.some(cell => cell.includes(word));
  const [, name, operator, value] = parts, column = names.indexOf(name);
  if (column < 0) throw new Error(`No column is called ${name}. There are ${names.join(', ')}.`);
  const wanted = readNumber(value);
  return cells => {
    const found = readNumber(cells[column]);
    if (!isNaN(wanted) && !isNaN(found)) return operators[operator](found, wanted);
    return '!='.includes(operator) && operators[operator](cells[column], value);
  };
}

function filter(table, text, output) {
  const names = [...table.tHead.rows[0].cells].map(head => nameColumn(head.textContent)), rows = [...table.tBodies[0].rows];
  let asked = [], problem = '';
  try {
    asked = text.toLowerCase().split(/\s+/).filter(Boolean).map(word => parseWord(word, names));
  } catch (error) {
    problem = error.message;
  }
  let shown = 0;
  for (const row of rows) {
    const cells = [...row.cells].map(cell => cell.textContent.trim().toLowerCase());
    row.hidden = !asked.every(holds => holds(cells));
    shown += !row.hidden;
  }
  output.textContent = problem || (shown ? `${shown} of ${rows.length} shown` : `None of ${rows.length} matches: ask for less.`);
}

// Wider or narrower tracks: the middle of what is seen stays where it is.
for (const button of document.querySelectorAll('.zoom button')) {
  button.addEventListener('click', () => {
    const box = button.parentElement.nextElementSibling, factor = Number(button.dataset.zoom);
    const middle = (box.scrollLeft + box.clientWidth / 2) / box.scrollWidth;
    const tracks = box.querySelectorAll('.spans, .axis'), width = factor * tracks[0].getBoundingClientRect().width;
    for (const track of tracks) {
      track.dataset.least ??= track.style.minWidth;
      track.style.minWidth = factor ? `${Math.min(width, 1e5)}px` : track.dataset.least;
    }
    box.scrollLeft = middle * box.scrollWidth - box.clientWidth / 2;
  });
}
for (const button of document.querySelectorAll('th[aria-sort] button')) {
  button.addEventListener('click', () => sortBy(button.closest('table'), button.closest('th').cellIndex));
}
for (const box of document.querySelectorAll('.filter')) {
  const table = document.getElementById(box.dataset.table), output = box.querySelector('output');
  box.querySelector('input').addEventListener('input', event => filter(table, event.target.value, output));
  filter(table, '', output);
}
