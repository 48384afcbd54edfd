// Pictures of HTML and SVG: bars of parts beside a capacity, a timeline on a canvas, a curve of clusters.
import {make, wide, percent, seconds, words, plural, count, short} from './text.js';

const colour = i => `var(--c${i % 8})`;

// One bar of parts on a scale that ends at `whole`; `mark` is drawn as a line.
export function track(parts, whole, {mark = null, range = null, say}) {
  const entries = Object.entries(parts), named = entries.filter(([, value]) => value > 0);
  const text = named.map(([name, value]) => `${words(name)} ${say(value)}`).join(', ');
  const pieces = entries.map(([name, value], i) => value > 0 && make('i', {
    style: {width: `${100 * value / whole}%`, background: colour(i)}, title: `${words(name)}: ${say(value)}`,
  }));
  const at = range && make('s', {style: {left: `${100 * Math.min(1, range[0] / whole)}%`, width: `${100 * (Math.min(1, range[1] / whole) - Math.min(1, range[0] / whole))}%`}});
  return make('div', {class: 'track', role: 'img', 'aria-label': text}, pieces, at, mark !== null && make('u', {style: {left: `${100 * mark / whole}%`}}));
}

export function legend(names, used, mark = '') {
  return make('div', {class: 'keys', 'aria-hidden': 'true'},
    names.map((name, i) => used(name) && make('span', {}, make('i', {style: {background: colour(i)}}), words(name))),
    mark && make('span', {}, make('u'), mark));
}

// Bars below each other: [name, parts, text], all on one scale.
export function bars(rows, whole, options) {
  return make('div', {class: 'bars'}, rows.map(([name, parts, text]) => make('div', {},
    make('b', {}, name), track(parts, whole, options), make('em', {}, text))));
}

const KINDS = {F: ['forward', 0], B: ['backward', 2], I: ['backward, its input\'s part', 2], W: ['backward, its weights\' part', 3]};

// An action [name, start, end], such as 3F0: stage 3, forward, microbatch 0.
function readAction([name, start, end]) {
  const [, stage, kind, microbatch] = /^(\d+)([A-Z])(\d+)$/.exec(name);
  return {stage: Number(stage), kind, microbatch: Number(microbatch), start, end};
}

// What each pipeline rank does when, on a canvas: a step may have ten thousand actions.
export function timeline(found, stages) {
  const rows = found.ranks.map(rank => ({...rank, actions: rank.actions.map(readAction)})), end = Math.max(...rows.flatMap(rank => rank.actions.map(each => each.end)));
  const kinds = [...new Set(rows.flatMap(rank => rank.actions.map(each => each.kind)))];
  const canvas = make('canvas', {role: 'img', 'aria-label': `Timeline of ${plural(rows.length, 'pipeline rank')}: ${percent(found.bubble)} of the time is waiting`});
  const place = make('output', {class: 'note'});
  const box = wide('Timeline of the schedule', canvas);
  const zoom = make('input', {type: 'range', min: 0, max: 6, step: 1, value: 0, 'aria-label': 'Zoom of the timeline'});
  const height = 26, left = 56;
  const draw = () => {
    const width = Math.max(200, box.clientWidth) * 2 ** Number(zoom.value), scale = Math.min(devicePixelRatio, 16000 / width);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(rows.length * height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${rows.length * height}px`;
    const pen = canvas.getContext('2d'), style = getComputedStyle(document.documentElement);
    const paint = name => style.getPropertyValue(name).trim();
    pen.scale(scale, scale);
    pen.font = '12px system-ui, sans-serif';
    pen.textBaseline = 'middle';
    rows.forEach((rank, i) => {
      pen.fillStyle = paint('--ink');
      pen.fillText(`rank ${rank.rank}`, 0, i * height + height / 2);
      pen.fillStyle = paint('--shade');
      pen.fillRect(left, i * height + 2, width - left, height - 4);
      for (const each of rank.actions) {
        const from = left + (width - left) * each.start / end, long = (width - left) * (each.end - each.start) / end;
        pen.globalAlpha = each.stage >= stages ? .6 : 1;
        pen.fillStyle = paint(`--c${(KINDS[each.kind] ?? ['', 6])[1]}`);
        pen.fillRect(from, i * height + 2, Math.max(.5, long - (long > 3 ? 1 : 0)), height - 4);
        pen.globalAlpha = 1;
        if (long > 22) {
          pen.fillStyle = paint('--paper');
          pen.fillText(String(each.microbatch), from + 3, i * height + height / 2, long - 5);
        }
      }
    });
  };
  canvas.addEventListener('pointermove', event => {
    const at = canvas.getBoundingClientRect(), rank = rows[Math.floor((event.clientY - at.top) / height)];
    const when = (event.clientX - at.left - left) / (at.width - left) * end;
    const action = rank?.actions.find(each => each.start <= when && when < each.end);
    place.textContent = action ? `rank ${rank.rank}: ${(KINDS[action.kind] ?? [action.kind])[0]} of microbatch ${action.microbatch}, stage ${action.stage}, ${seconds(action.start)} to ${seconds(action.end)}` : '';
  });
  zoom.addEventListener('input', draw);
  new ResizeObserver(draw).observe(box);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  const keys = make('div', {class: 'keys'}, kinds.map(kind => KINDS[kind] && make('span', {}, make('i', {style: {background: colour(KINDS[kind][1])}}), KINDS[kind][0])),
    make('span', {}, make('label', {}, 'zoom ', zoom)));
  return make('div', {}, keys, box, place);
}

// A curve of {x, y, text, mark}: x on a log axis, y too or from 0.
export function curve(points, {name, isLinear = false}) {
  const width = 560, height = 280, left = 64, right = 24, top = 26, bottom = 30;
  const xs = points.map(each => each.x), ys = points.map(each => each.y);
  const [x0, x1] = [Math.min(...xs) / 1.15, Math.max(...xs) * 1.15];
  const [y0, y1] = isLinear ? [0, 1.2 * Math.max(...ys)] : [Math.min(...ys) / 1.25, Math.max(...ys) * 1.25];
  const up = value => height - bottom - (height - top - bottom) * (isLinear ? value / y1 : Math.log(value / y0) / Math.log(y1 / y0));
  const along = value => left + (width - left - right) * Math.log(value / x0) / Math.log(x1 / x0);
  const places = points.map(each => [along(each.x), up(each.y)]);
  const anchor = x => x > width - 90 ? 'end' : x < left + 40 ? 'start' : 'middle';
  return make('svg:svg', {class: 'chart', viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${name}: ${points.map(each => each.text).join('; ')}`},
    (isLinear ? linearTicks(y1) : niceTicks(y0, y1)).map(value => [
      make('svg:line', {class: 'axis-line', x1: left, x2: width - right, y1: up(value), y2: up(value)}),
      make('svg:text', {class: 'soft', x: left - 8, y: up(value) + 4, 'text-anchor': 'end'}, short(value))]),
    points.map((each, i) => make('svg:text', {class: 'soft', x: places[i][0], y: height - 8, 'text-anchor': 'middle'}, count(each.x))),
    make('svg:text', {class: 'soft', x: left - 8, y: height - 8, 'text-anchor': 'end'}, 'GPUs'),
    make('svg:polyline', {class: 'line', points: places.map(each => each.map(value => value.toFixed(1)).join(',')).join(' ')}),
    points.map((each, i) => make('svg:circle', {class: each.mark ? 'dot marked' : 'dot', cx: places[i][0], cy: places[i][1], r: 6}, make('svg:title', {}, each.text))),
    points.map((each, i) => each.mark && make('svg:text', {x: places[i][0], y: places[i][1] - 12, 'text-anchor': anchor(places[i][0])}, each.mark)));
}

function linearTicks(high) {
  const rough = high / 4, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find(each => each * power >= rough) * power;
  return Array.from({length: Math.floor(high / step) + 1}, (_, i) => i * step);
}

function niceTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const step of [1, 2, 5]) {
      const value = step * 10 ** power;
      if (value > low && value < high) found.push(value);
    }
  }
  return found.length > 6 ? found.filter(value => /^1/.test(String(value).replace(/^0\.0*/, ''))) : found;
}
