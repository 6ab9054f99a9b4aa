// Prometheus metrics in the text format: samples, their sums, and quantiles of histograms.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { n: "\n", '"': '"', "\\": "\\" };

const number = (text) => Number(text.replace("Inf", "Infinity"));
const unescape = (text) => text.replace(/\\(.)/g, (whole, c) => ESCAPES[c] ?? whole);

export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (found) {
      const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, k, v]) => [k, unescape(v)]));
      samples.push({ name: found[1], labels, value: number(found[3]) });
    }
  }
  return samples;
}

const all = () => true;

export const select = (samples, name, keep = all) => samples.filter((s) => s.name === name && keep(s.labels));
export const sum = (samples, name, keep = all) => select(samples, name, keep).reduce((total, s) => total + s.value, 0);

// The buckets of a histogram as [bound, count], summed over its labels.
export function buckets(samples, name, keep = all) {
  const found = new Map();
  for (const { labels, value } of select(samples, `${name}_bucket`, keep)) {
    const bound = number(labels.le);
    found.set(bound, (found.get(bound) ?? 0) + value);
  }
  return [...found].sort(([a], [b]) => a - b);
}

// The quantile of what a histogram counted between two scrapes, linear within a bucket, as Prometheus computes it.
export function quantile(q, before, after) {
  const earlier = new Map(before);
  const counts = after.map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const rank = q * total;
  let [lower, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= rank) return bound === Infinity ? lower : lower + ((bound - lower) * (rank - below)) / Math.max(count - below, 1);
    [lower, below] = [bound, count];
  }
  return null;
}

// The change of a counter between two scrapes; one that has started anew counts from 0.
export function increase(before, after, name, keep = all) {
  const change = sum(after, name, keep) - sum(before, name, keep);
  return change >= 0 ? change : sum(after, name, keep);
}

// The calls of each model since the start, in any version and with any outcome, by its name. Most lines are 0.
export function callsByModel(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (line.startsWith("#") || line === "") continue;
    const model = unescape(/[{,]model="((?:[^"\\]|\\.)*)"/.exec(line)?.[1] ?? "");
    found.set(model, (found.get(model) ?? 0) + Number(line.slice(line.lastIndexOf(" ") + 1)));
  }
  return found;
}
