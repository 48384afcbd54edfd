// Elements made of text alone, never of HTML, and numbers as people read them.
export function make(tag, properties = {}, ...children) {
  const made = tag.startsWith('svg:') ? document.createElementNS('http://www.w3.org/2000/svg', tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === 'style') Object.entries(value).forEach(([key, each]) => made.style.setProperty(key, each));
    else if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, '');
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...keep(children));
  return made;
}

// Puts children in the place of those that an element has; what is false, null or undefined is no child.
export const fill = (place, ...children) => place.replaceChildren(...keep(children));
const keep = children => children.flat(Infinity).filter(each => each !== null && each !== undefined && each !== false && each !== '');

// What may be wider than its place scrolls sideways by itself, by keyboard too.
export const wide = (name, ...children) => make('div', {class: 'wide', role: 'region', tabindex: '0', 'aria-label': name}, ...children);

export const GIB = 2 ** 30;
export const bytes = value => {
  const [size, unit] = value >= GIB || value === 0 ? [GIB, 'GiB'] : value >= 2 ** 20 ? [2 ** 20, 'MiB'] : [1024, 'KiB'];
  const amount = value / size;
  return `${amount.toFixed(amount >= 100 ? 0 : 1)} ${unit}`;
};
export const decimal = value => value >= 1e12 ? `${digits(value / 1e12)} TB` : value >= 1e9 || value === 0 ? `${digits(value / 1e9)} GB` : `${digits(value / 1e6)} MB`;  // of links, whose bandwidths are decimal
export const count = value => Math.round(value).toLocaleString('en');
export const digits = value => value === 0 ? '0' : Math.abs(value) >= 1000 ? count(value) : String(Number(value.toPrecision(3)));
export const percent = (share, places = 0) => `${(100 * share).toFixed(places)} %`;
export const seconds = value => value >= 1 ? `${digits(value)} s` : value >= 1e-3 ? `${digits(1e3 * value)} ms` : `${digits(1e6 * value)} µs`;
export const billions = value => value >= 1e12 ? `${digits(value / 1e12)}T` : value >= 1e9 ? `${digits(value / 1e9)}B` : `${digits(value / 1e6)}M`;
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
export const short = value => value >= 1e6 ? `${digits(value / 1e6)}M` : value >= 1e4 ? `${digits(value / 1e3)}k` : digits(value);
export const words = name => name.replaceAll('_', ' ');
export const sentence = text => text ? text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? '' : '.') : '';

// A number that says where it comes from when it is pressed (origin.js).
export const number = (text, origin, label = '') => make('button', {
  type: 'button', class: 'number', 'data-origin': origin, 'aria-label': label ? `${label}: ${text}. Where it comes from` : null,
}, text);

// A layout in words, for those who don't read its name.
export function describeLayout(layout) {
  const {pp, tp, cp, ep, dp_replicate, dp_shard, micro_batch, zero, recompute, offload, virtual_stages} = layout;
  const ways = dp_replicate * dp_shard, found = [];
  if (ways > 1) found.push(`${ways} ranks with data of their own${dp_replicate > 1 && dp_shard > 1 ? `, the state sharded over ${dp_shard}` : ''}`);
  if (tp > 1) found.push(`matmuls split over ${tp}`);
  if (cp > 1) found.push(`sequences split over ${cp}`);
  if (ep > 1) found.push(`experts over ${ep}`);
  if (pp > 1) found.push(`a pipeline of ${pp} ranks${virtual_stages > 1 ? ` with ${virtual_stages} stages each` : ''}`);
  if (ways > 1) found.push({1: 'ZeRO-1', 2: 'ZeRO-2', 3: 'ZeRO-3'}[zero]);
  found.push(`${micro_batch === 1 ? 'one sequence' : `${micro_batch} sequences`} at a time`);
  if (recompute !== 'none') found.push(`recomputation ${recompute}`);
  if (offload !== 'none') found.push(`${offload === 'both' ? 'activations and optimizer' : offload} on the host`);
  return sentence(found.join(', '));
}
