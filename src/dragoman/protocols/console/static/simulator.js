// A UM-Bridge model: its parameters as sliders, its outputs and gradient, and a check of the gradient by differences.
import { read } from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { format } from "./plot.js";

const MAX_SLIDERS = 24;
const WAIT_MS = 150;

const post = (path, body, signal) => read(path, { method: "POST", body, signal });

function parseConfig(text) {
  const value = JSON.parse(text.trim() || "{}");
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("expected a JSON object");
  return value;
}

// The derivative of `sens · output` by each parameter, by central differences with steps relative to its size.
async function differences(evaluate, input, inWrt, sens) {
  const found = [];
  for (let i = 0; i < input[inWrt].length; i++) {
    const step = 1e-5 * Math.max(1, Math.abs(input[inWrt][i]));
    const moved = (sign) => input.map((vector, k) => (k === inWrt ? vector.map((v, j) => (j === i ? v + sign * step : v)) : vector));
    const [up, down] = [await evaluate(moved(1)), await evaluate(moved(-1))];
    found.push(sens.reduce((sum, s, j) => sum + (s * (up[j] - down[j])) / (2 * step), 0));
  }
  return found;
}

function Bars({ values, labels }) {
  const most = Math.max(...values.map(Math.abs), 1e-300);
  return html`<table class="bars"><tbody>${values.map(
    (v, i) => html`<tr><th scope="row">${labels[i]}</th><td class="number">${format(v)}</td>
      <td><meter class=${v < 0 ? "negative" : ""} min="0" max="1" value=${Math.abs(v) / most}>${format(v)}</meter></td></tr>`,
  )}</tbody></table>`;
}

function useModel(name, config) {
  const [input, setInput] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    post("/InputSizes", { name, config }).then(
      ({ inputSizes }) => (setInput(inputSizes.map((n) => Array(n).fill(1))), setProblem("")),
      (error) => setProblem(error.message),
    );
  }, [name, config]);
  return { input, setInput, problem };
}

export function Simulator({ name, support }) {
  const [configText, setConfigText] = useState("{}");
  const [config, setConfig] = useState({});
  const { input, setInput, problem } = useModel(name, config);
  const [result, setResult] = useState(null);
  const [failure, setFailure] = useState("");
  const [check, setCheck] = useState("");
  const [target, setTarget] = useState([0, 0]);
  const turn = useRef(0);

  useEffect(() => {
    if (!input) return undefined;
    const mine = ++turn.current;
    const abort = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const { output } = await post("/Evaluate", { name, input, config }, abort.signal);
        const [inWrt, outWrt] = target;
        const sens = output[outWrt]?.map(() => 1) ?? [];
        const gradient = support.Gradient
          ? (await post("/Gradient", { name, outWrt, inWrt, sens, input, config }, abort.signal)).output
          : null;
        if (mine === turn.current) setResult({ output, gradient }), setFailure(""), setCheck("");
      } catch (error) {
        if (error.name !== "AbortError" && mine === turn.current) setFailure(error.message);
      }
    }, WAIT_MS);
    return () => (clearTimeout(timer), abort.abort());
  }, [input, config, target]);

  async function verify() {
    const [inWrt, outWrt] = target;
    setCheck("comparing …");
    try {
      const evaluate = async (at) => (await post("/Evaluate", { name, input: at, config })).output[outWrt];
      const expected = await differences(evaluate, input, inWrt, result.output[outWrt].map(() => 1));
      const scale = Math.max(...expected.map(Math.abs), ...result.gradient.map(Math.abs), 1e-300);
      const worst = Math.max(...expected.map((v, i) => Math.abs(v - result.gradient[i]))) / scale;
      setCheck(`differs from central differences by ${worst.toExponential(1)} of the largest component${worst > 1e-4 ? ": too much, unless the model is noisy or not smooth here" : ""}`);
    } catch (error) {
      setCheck(error.message);
    }
  }

  function applyConfig(event) {
    event.preventDefault();
    try {
      setConfig(parseConfig(configText));
      setFailure("");
    } catch (error) {
      setFailure(`config: ${error.message}`);
    }
  }

  if (problem) return html`<p class="error" role="alert">${problem}</p>`;
  if (!input) return html`<p class="note">Loading …</p>`;
  const change = (k, i, v) => Number.isFinite(v) && setInput(input.map((vector, a) => (a === k ? vector.map((old, b) => (b === i ? v : old)) : vector)));
  return html`<form class="row" onSubmit=${applyConfig}><label class="inline">config
      <input size="30" value=${configText} spellcheck="false" onInput=${(e) => setConfigText(e.target.value)} /></label><button>Apply</button></form>
    <div class="columns">
      <div><h3>Parameters</h3>${input.map((vector, k) => html`<fieldset key=${k}><legend>input ${k}</legend>
        ${vector.slice(0, MAX_SLIDERS).map((v, i) => html`<label class="slider" key=${i}><span>x${k}[${i}]</span>
          <input type="range" min="-5" max="5" step="0.01" value=${v} onInput=${(e) => change(k, i, Number(e.target.value))} />
          <input type="number" step="any" value=${v} aria-label=${`value of x${k}[${i}]`} onChange=${(e) => change(k, i, Number(e.target.value))} /></label>`)}
        ${vector.length > MAX_SLIDERS && html`<p class="note">${vector.length - MAX_SLIDERS} further parameters stay 1.</p>`}
      </fieldset>`)}</div>
      <div aria-live="polite">
        ${failure && html`<p class="error" role="alert">${failure}</p>`}
        ${result && html`<h3>Outputs</h3>
          ${result.output.map((vector, k) => html`<${Bars} values=${vector.slice(0, 100)} labels=${vector.map((_, i) => `y${k}[${i}]`)} />`)}
          ${result.gradient && html`<h3>Gradient</h3>
            <p class="row"><label class="inline">of the sum of output <select value=${target[1]} onChange=${(e) => setTarget([target[0], Number(e.target.value)])}>
              ${result.output.map((_, k) => html`<option>${k}</option>`)}</select></label>
              <label class="inline">by input <select value=${target[0]} onChange=${(e) => setTarget([Number(e.target.value), target[1]])}>
              ${input.map((_, k) => html`<option>${k}</option>`)}</select></label>
              <button onClick=${verify}>Check</button></p>
            <${Bars} values=${result.gradient.slice(0, 100)} labels=${result.gradient.map((_, i) => `x${target[0]}[${i}]`)} />
            ${check && html`<p class="note" role="status">${check}</p>`}`}`}
      </div>
    </div>`;
}
