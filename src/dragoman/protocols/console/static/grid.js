// A function over a grid of two parameters: its points, its values in few requests, and its contour lines.

const FIRST_ROWS = 25;
const AIM_MS = 600; // of a request: the reader can stop, and sees progress
const PARALLEL = 6; // as many as a browser sends to a server at once

// `count` values from low to high.
export const spaced = (low, high, count) => Array.from({ length: count }, (_, i) => low + ((high - low) * i) / (count - 1));

// Evaluate all points in parts: `evaluate(points)` sends one request. Parts grow as long as they are fast.
export async function inParts(points, evaluate) {
  let rows = FIRST_ROWS;
  for (let from = 0; from < points.length; ) {
    const part = points.slice(from, from + rows);
    const started = performance.now();
    await evaluate(part);
    from += part.length;
    rows = Math.max(1, Math.round((part.length * AIM_MS) / Math.max(1, performance.now() - started)));
  }
}

// Evaluate points one by one, a few at a time.
export async function oneByOne(points, evaluate) {
  let next = 0;
  const work = async () => {
    while (next < points.length) await evaluate(points[next++]);
  };
  await Promise.all(Array.from({ length: PARALLEL }, work));
}

// The values of a square grid in one with more points between them, which are undefined.
export function refined(values, side, finer) {
  const step = (finer - 1) / (side - 1);
  return Array.from({ length: finer ** 2 }, (_, at) => {
    const [i, j] = [(at % finer) / step, Math.floor(at / finer) / step];
    return Number.isInteger(i) && Number.isInteger(j) ? values[j * side + i] : undefined;
  });
}

// Lines of equal value through a grid of `columns` by `rows` values, row by row: [x0, y0, x1, y1] each, in cells. A cell with a
// value that is not finite has none. Marching squares; the middle of a cell decides in a saddle.
export function contours(values, columns, rows, level) {
  const found = [];
  for (let j = 0; j + 1 < rows; j++) {
    for (let i = 0; i + 1 < columns; i++) {
      const [a, b, c, d] = [values[j * columns + i], values[j * columns + i + 1], values[(j + 1) * columns + i + 1], values[(j + 1) * columns + i]];
      if (![a, b, c, d].every(Number.isFinite)) continue;
      const cut = (p, q) => (level - p) / (q - p);
      const sides = [
        a < level !== b < level && [i + cut(a, b), j],
        b < level !== c < level && [i + 1, j + cut(b, c)],
        d < level !== c < level && [i + cut(d, c), j + 1],
        a < level !== d < level && [i, j + cut(a, d)],
      ];
      const points = sides.filter(Boolean);
      if (points.length === 2) found.push([...points[0], ...points[1]]);
      if (points.length === 4) {
        const isAbove = (a + b + c + d) / 4 >= level;
        const [top, right, bottom, left] = points;
        const pairs = isAbove === a >= level ? [[top, right], [bottom, left]] : [[top, left], [bottom, right]];
        for (const [p, q] of pairs) found.push([...p, ...q]);
      }
    }
  }
  return found;
}

// Round numbers between two bounds, about `count` of them.
export function ticks(low, high, count = 5) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count));
  const wide = [1, 2, 5, 10].map((n) => n * step).find((s) => (high - low) / s <= count) ?? 10 * step;
  const first = Math.ceil(low / wide - 1e-9);
  const last = Math.floor(high / wide + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * wide).toPrecision(12)));
}
