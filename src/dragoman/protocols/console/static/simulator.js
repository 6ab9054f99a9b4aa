// A UM-Bridge model: its parameters as sliders, its outputs and gradient as plots, and a check by finite differences.
import { read } from "./api.js";
import { Bars } from "./bars.js";
import { differences, relativeError, sweep, total, withValue } from "./differences.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { SimulatorMap } from "./map.js";
import { Plot } from "./plot.js";

const MAX_SLIDERS = 24;
const MAX_BARS = 7; // longer vectors are plotted
const SIDE = 5; // sliders of a parameter without a declared value go from -5 to 5
const WAIT_MS = 150;
const SWEEP_POINTS = 25;
const SLOW_MS = 1000; // the gradient of a slower model, which may take many evaluations, is computed on request
const TOLERANCE = 1e-4;

const post = (path, body, signal) => read(path, { method: "POST", body, signal });

function parseConfig(text) {
  const value = JSON.parse(text.trim() || "{}");
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("expected a JSON object");
  return value;
}

const isPointOf = (point, sizes) => Array.isArray(point) && point.length === sizes.length && point.every((vector, i) => vector.length === sizes[i]);

// The input at first: the point that the model declares, else ones.
const firstInput = (sizes, point) => (isPointOf(point, sizes) ? point : sizes.map((n) => Array(n).fill(1)));

// The ranges of the sliders, [low, high] of each element: from 0 to twice its declared value; of a 0, as far on both sides as
// the largest of its vector.
export function firstRanges(sizes, point) {
  if (!isPointOf(point, sizes)) return sizes.map((n) => Array(n).fill([-SIDE, SIDE]));
  return point.map((vector) => {
    const side = 2 * vector.reduce((most, v) => Math.max(most, Math.abs(v)), 0) || SIDE;
    return vector.map((v) => (v === 0 ? [-side, side] : [Math.min(0, 2 * v), Math.max(0, 2 * v)]));
  });
}

function useInput(name, config, point) {
  const [input, setInput] = useState(null);
  const [ranges, setRanges] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    post("/InputSizes", { name, config }).then(
      ({ inputSizes }) => (setRanges(firstRanges(inputSizes, point)), setInput(firstInput(inputSizes, point)), setProblem("")),
      (error) => setProblem(error.message),
    );
  }, [name, config]);
  return { input, setInput, ranges, setRanges, problem };
}

// Names of a vector and of its elements; a vector of one has the same for both.
const vectorName = (tensors, k, letter) => tensors?.[k]?.name ?? `${letter}${k}`;
const elementName = (vector, size, i) => (size === 1 ? vector : `${vector}[${i}]`);
const scalarName = (result, outWrt, of) => (result.output[outWrt]?.length === 1 ? of : `sum of ${of}`);

// Output and gradient at a point, once it has not changed for a moment. `differentiate` adds the gradient of a slow model.
function useResult({ name, input, config, target: [inWrt, outWrt], hasGradient }) {
  const [result, setResult] = useState(null);
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const turn = useRef(0);
  useEffect(() => {
    if (!input) return undefined;
    const mine = ++turn.current;
    const abort = new AbortController();
    const attempt = async (compute) => {
      setBusy(true);
      try {
        const found = await compute();
        if (mine === turn.current) setResult(found), setProblem("");
      } catch (error) {
        if (error.name !== "AbortError" && mine === turn.current) setProblem(error.message);
      }
      if (mine === turn.current) setBusy(false);
    };
    const gradientAt = async (output) => {
      const sens = output[outWrt]?.map(() => 1) ?? [];
      return (await post("/Gradient", { name, outWrt, inWrt, sens, input, config }, abort.signal)).output;
    };
    const timer = setTimeout(() => attempt(async () => {
      const started = performance.now();
      const { output } = await post("/Evaluate", { name, input, config }, abort.signal);
      const ms = performance.now() - started;
      const found = { output, gradient: null, input, ms };
      if (!hasGradient) return found;
      if (ms < SLOW_MS) return { ...found, gradient: await gradientAt(output) };
      return { ...found, differentiate: () => attempt(async () => ({ ...found, gradient: await gradientAt(output) })) };
    }), WAIT_MS);
    return () => (clearTimeout(timer), abort.abort());
  }, [input, config, inWrt, outWrt]);
  return { result, problem, isBusy };
}

// A vector as bars if it is short, else as a line.
function VectorPlot({ title, values, labels, others = null, othersTitle = "" }) {
  if (values.length <= MAX_BARS) {
    return html`<${Bars} title=${title} values=${values} labels=${labels} others=${others} othersTitle=${othersTitle} />`;
  }
  const series = [{ label: others ? title : "", values }];
  if (others) series.push({ label: othersTitle, values: values.map((_, i) => others[i] ?? null) });
  return html`<${Plot} title=${title} x=${values.map((_, i) => i)} series=${series} />`;
}

// A field for each end of the range of each slider. A range whose ends change places is turned.
function Ranges({ parameters, ranges, onRanges }) {
  const change = ({ k, i }, end, value) => {
    if (!Number.isFinite(value)) return;
    const range = ranges[k][i].map((old, at) => (at === end ? value : old)).sort((a, b) => a - b);
    onRanges(withValue(ranges, k, i, range));
  };
  const field = (parameter, end) => html`<input type="number" step="any" class="narrow-number" value=${ranges[parameter.k][parameter.i][end]}
    aria-label=${`${end === 0 ? "least" : "greatest"} ${parameter.name}`} onChange=${(e) => change(parameter, end, e.target.valueAsNumber)} />`;
  return html`<details><summary>Ranges of the sliders${parameters.length > 1 && " and of the map"}</summary>
    ${parameters.map((parameter) => html`<p class="row range" key=${parameter.name}><code>${parameter.name}</code> from ${field(parameter, 0)} to ${field(parameter, 1)}</p>`)}</details>`;
}

function Sliders({ input, names, parameters, ranges, onChange, onRanges }) {
  const change = (k, i, value) => Number.isFinite(value) && onChange(withValue(input, k, i, value));
  return html`<h2>Parameters</h2>
    ${input.map((vector, k) => html`<fieldset key=${k}><legend>${names[k]}</legend>
      ${vector.slice(0, MAX_SLIDERS).map((v, i) => html`<div class="slider" key=${i}><label for=${`x-${k}-${i}`}>${elementName(names[k], vector.length, i)}</label>
        <input type="range" id=${`x-${k}-${i}`} min=${Math.min(...ranges[k][i], v)} max=${Math.max(...ranges[k][i], v)} step=${(ranges[k][i][1] - ranges[k][i][0]) / 1000 || "any"} value=${v}
          onInput=${(e) => change(k, i, Number(e.target.value))} />
        <input type="number" step="any" value=${v} aria-label=${`value of ${elementName(names[k], vector.length, i)}`} onChange=${(e) => change(k, i, e.target.valueAsNumber)} /></div>`)}
      ${vector.length > MAX_SLIDERS && html`<p class="note">${vector.length - MAX_SLIDERS} further parameters stay as they are.</p>`}
    </fieldset>`)}
    <${Ranges} parameters=${parameters} ranges=${ranges} onRanges=${onRanges} />`;
}

function Gradient({ evaluate, result, target: [inWrt], names: [by, of] }) {
  const [check, setCheck] = useState(null); // of one result
  const [problem, setProblem] = useState("");
  const isCurrent = check?.result === result;
  async function verify() {
    setCheck({ result, expected: null });
    setProblem("");
    try {
      const expected = await differences(evaluate, result.input, inWrt, Math.min(result.gradient.length, MAX_SLIDERS));
      setCheck({ result, expected });
    } catch (error) {
      setProblem(error.message);
    }
  }
  const { gradient } = result;
  const expected = isCurrent ? check.expected : null;
  const error = expected && relativeError(expected, gradient);
  const checked = expected && expected.length < gradient.length ? ` in the first ${expected.length} components` : "";
  return html`<${VectorPlot} title=${`gradient of ${of} by ${by}`} values=${gradient} labels=${gradient.map((_, i) => elementName(by, gradient.length, i))}
      others=${expected} othersTitle="central differences" />
    <p class="row"><button onClick=${verify}>Check</button>
      <span class=${error > TOLERANCE ? "error" : "note"} role="status">${problem || (isCurrent && !expected && "comparing …") ||
        (expected && `differs from central differences by ${error.toExponential(1)} of the largest component${checked}${
          error > TOLERANCE ? ": too much, unless the model is noisy or not smooth here" : ""}`)}</span></p>`;
}

// The output along one parameter, with the tangent by the gradient.
function Sweep({ evaluate, result, ranges, target: [inWrt, outWrt], names: [by, of] }) {
  const [index, setIndex] = useState(0);
  const [curve, setCurve] = useState(null);
  const [problem, setProblem] = useState("");
  async function run() {
    setCurve({ result, index });
    setProblem("");
    try {
      setCurve({ result, index, ...(await sweep(evaluate, result.input, [inWrt, index], ranges[inWrt][index], SWEEP_POINTS)) });
    } catch (error) {
      setProblem(error.message);
    }
  }
  const isCurrent = curve?.result === result && curve.index === index;
  const at = result.input[inWrt][index];
  const now = total(result.output[outWrt]);
  const tangent = isCurrent && curve.x && result.gradient && curve.x.map((x) => now + result.gradient[index] * (x - at));
  const name = scalarName(result, outWrt, of);
  const along = (i) => elementName(by, result.input[inWrt].length, i);
  return html`<p class="row"><label class="inline">vary <select value=${index} onChange=${(e) => setIndex(Number(e.target.value))}>
      ${result.input[inWrt].slice(0, MAX_SLIDERS).map((_, i) => html`<option value=${i}>${along(i)}</option>`)}</select></label>
      <button onClick=${run}>Plot</button><span class="note" role="status">${isCurrent && !curve.x && (problem || "computing …")}</span></p>
    ${isCurrent && curve.x && html`<${Plot} title=${`${name} along ${along(index)}`} x=${curve.x} xLabel=${along(index)}
      series=${[{ label: name, values: curve.y }, ...(tangent ? [{ label: `tangent at ${at}`, values: tangent }] : [])]} />`}`;
}

function ConfigForm({ onConfig, onError }) {
  const [text, setText] = useState("{}");
  const [wrong, setWrong] = useState(null);
  const apply = (event) => {
    event.preventDefault();
    try {
      onConfig(parseConfig(text));
      onError("");
    } catch (error) {
      onError(`config: ${error.message}`);
      setWrong(text);
      event.target.elements[0].focus();
    }
  };
  return html`<form class="row" onSubmit=${apply}><label class="inline">config
    <input size="30" value=${text} aria-invalid=${text === wrong ? "true" : undefined} spellcheck=${false} onInput=${(e) => setText(e.target.value)} /></label><button>Apply</button></form>`;
}

export function Simulator({ name, support, metadata }) {
  const [config, setConfig] = useState({});
  const [wrong, setWrong] = useState("");
  const [target, setTarget] = useState([0, 0]);
  const { input, setInput, ranges, setRanges, problem } = useInput(name, config, metadata.details?.point);
  const { result, problem: failure, isBusy } = useResult({ name, input, config, target, hasGradient: support.Gradient });

  if (problem) return html`<${ConfigForm} onConfig=${setConfig} onError=${setWrong} /><p class="error" role="alert">${wrong || problem}</p>`;
  if (!input) return html`<p class="note">Loading …</p>`;
  const evaluate = async (at, signal) => (await post("/Evaluate", { name, input: at, config }, signal)).output[target[1]];
  const names = input.map((_, k) => vectorName(metadata.inputs, k, "x"));
  const outputName = (k) => vectorName(metadata.outputs, k, "y");
  const chosen = [names[target[0]], outputName(target[1])];
  const parameters = input.flatMap((vector, k) =>
    vector.slice(0, MAX_SLIDERS).map((_, i) => ({ k, i, name: elementName(names[k], vector.length, i) })));
  const choice = (index, label, options) => html`<label class="inline">${label} <select value=${target[index]}
    onChange=${(e) => setTarget(target.map((old, i) => (i === index ? Number(e.target.value) : old)))}>
    ${options.map((option, k) => html`<option value=${k}>${option}</option>`)}</select></label>`;
  return html`<${ConfigForm} onConfig=${setConfig} onError=${setWrong} />
    <div class="columns wide">
      <div><${Sliders} input=${input} names=${names} parameters=${parameters} ranges=${ranges} onChange=${setInput} onRanges=${setRanges} />
        ${result && parameters.length > 1 && html`<${SimulatorMap} key=${name} name=${name} input=${input} metadata=${metadata} config=${config} result=${result} ranges=${ranges}
          target=${target} title=${scalarName(result, target[1], chosen[1])} parameters=${parameters} evaluate=${evaluate} onInput=${setInput} />`}</div>
      <div>
        ${(wrong || failure) && html`<p class="error" role="alert">${wrong || failure}</p>`}
        ${isBusy && !(result?.ms < SLOW_MS) && html`<p class="note" role="status">computing …</p>`}
        ${result && html`<h2>Outputs</h2>
          ${result.output.map((vector, k) => html`<${VectorPlot} key=${k} title=${outputName(k)} values=${vector} labels=${vector.map((_, i) => elementName(outputName(k), vector.length, i))} />`)}
          ${result.input[target[0]]?.length > 0 && result.output[target[1]] && html`<h2>${support.Gradient ? "Gradient of the sum of an output" : "Along a parameter"}</h2>
            <p class="row">${choice(1, "output", result.output.map((_, k) => outputName(k)))} ${choice(0, "by input", names)}</p>
            ${result.gradient && html`<${Gradient} evaluate=${evaluate} result=${result} target=${target} names=${chosen} />`}
            ${!result.gradient && result.differentiate && html`<p class="row"><button onClick=${result.differentiate} disabled=${isBusy}>Compute the gradient</button></p>`}
            <${Sweep} evaluate=${evaluate} result=${result} ranges=${ranges} target=${target} names=${chosen} />`}`}
      </div>
    </div>`;
}
