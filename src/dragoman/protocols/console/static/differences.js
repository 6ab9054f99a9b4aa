// Derivatives by finite differences, to check a gradient and to draw it.

// The vectors with one component replaced.
export const withValue = (input, k, i, value) => input.map((vector, a) => (a === k ? vector.map((old, b) => (b === i ? value : old)) : vector));

export const total = (vector) => vector.reduce((sum, v) => sum + v, 0);

// The derivative of the sum of an output by the first `count` parameters of input `inWrt`, by central differences with
// steps relative to the parameters. `evaluate` returns the output at a point.
export async function differences(evaluate, input, inWrt, count) {
  const found = [];
  for (let i = 0; i < count; i++) {
    const at = input[inWrt][i];
    const step = 1e-5 * Math.max(1, Math.abs(at));
    const [up, down] = [await evaluate(withValue(input, inWrt, i, at + step)), await evaluate(withValue(input, inWrt, i, at - step))];
    found.push(total(up.map((v, j) => v - down[j])) / (2 * step));
  }
  return found;
}

// The largest difference of two lists, relative to their largest component.
export function relativeError(expected, got) {
  const scale = Math.max(...expected.map(Math.abs), ...got.map(Math.abs), 1e-300);
  return Math.max(...expected.map((v, i) => Math.abs(v - got[i]))) / scale;
}

// The sum of an output along one parameter: `count` points from low to high.
export async function sweep(evaluate, input, [k, i], [low, high], count) {
  const x = Array.from({ length: count }, (_, n) => low + ((high - low) * n) / (count - 1));
  const y = [];
  for (const value of x) y.push(total(await evaluate(withValue(input, k, i, value))));
  return { x, y };
}
