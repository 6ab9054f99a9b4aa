// A form made from a model's signature, and its outputs as tables and plots.
import { call, modelPath, roundsIntegers } from "./api.js";
import { html, useState } from "./html.js";
import { Plot } from "./plot.js";
import { chooseShape, parseValues, rowsOf, show, size } from "./tensors.js";

const MIN_PLOTTED = 3;
const MAX_SERIES = 6;

// Rows a line, so that a table can be edited and pasted.
function initialText(example) {
  if (!example) return "";
  const rows = rowsOf(example);
  return rows ? rows.map((row) => row.map(show).join(", ")).join("\n") : JSON.stringify(example.data);
}

function Output({ tensor }) {
  const rows = rowsOf(tensor);
  const flat = tensor.data?.flat(Infinity) ?? [];
  const numeric = flat.length > 0 && flat.every((v) => typeof v === "number" || v === null);
  const isLine = rows && numeric && rows.length >= MIN_PLOTTED && (tensor.shape[1] ?? 1) <= MAX_SERIES;
  const total = size(tensor.shape);
  return html`<h3><code>${tensor.name}</code> <small>${tensor.datatype} [${tensor.shape.join(", ")}]</small></h3>
    ${isLine && html`<${Plot} title=${tensor.name} x=${rows.map((_, i) => i)}
      series=${rows[0].map((_, k) => ({ label: rows[0].length > 1 ? `${tensor.name}[${k}]` : "", values: rows.map((r) => r[k]) }))} />`}
    ${rows
      ? html`<div class="scroll short"><table><tbody>${rows.map(
          (row, i) => html`<tr><th scope="row">${i}</th>${row.map((v) => html`<td>${show(v)}</td>`)}</tr>`,
        )}</tbody></table></div>
        ${rows.length * (rows[0]?.length ?? 1) < total && html`<p class="note">The first ${rows.length} of ${tensor.shape[0]} rows.</p>`}`
      : html`<pre class="scroll short">${flat.slice(0, 1000).map(show).join(" ")}${flat.length > 1000 ? " …" : ""}</pre>`}`;
}

export function TryIt({ name, version, model }) {
  const examples = new Map((model.example?.inputs ?? []).map((tensor) => [tensor.name, tensor]));
  const [fields, setFields] = useState(() =>
    model.metadata.inputs.map((spec) => ({
      ...spec,
      anyRank: spec.parameters?.any_rank === true,
      text: initialText(examples.get(spec.name)),
      typedShape: "",
      isSent: examples.has(spec.name) || model.example === null,
    })),
  );
  const [answer, setAnswer] = useState(null);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const change = (index, values) => setFields(fields.map((field, i) => (i === index ? { ...field, ...values } : field)));

  // The text of the request, with the numbers as they were typed, and notes for the reader.
  function compose() {
    const notes = [];
    const inputs = fields.filter((f) => f.isSent).map((field) => {
      try {
        const declared = field.anyRank ? null : field.shape;
        const { data, shape, skipped } = parseValues(field.text, field.datatype, field.anyRank ? 1 : field.shape.length);
        if (skipped) notes.push(`${field.name}: the first line, of names, was not sent`);
        const sent = chooseShape(field.typedShape, declared, shape);
        return `{"name": ${JSON.stringify(field.name)}, "datatype": "${field.datatype}", "shape": ${JSON.stringify(sent)}, "data": ${data}}`;
      } catch (error) {
        throw new Error(`${field.name}: ${error.message}`);
      }
    });
    return { body: `{"inputs": [${inputs.join(", ")}]}`, notes };
  }

  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    try {
      const { body, notes } = compose();
      const found = await call(`${modelPath(name, version)}/infer`, { method: "POST", body });
      setAnswer({ ...found, notes });
      setProblem("");
    } catch (error) {
      setAnswer(null);
      setProblem(error.message);
    }
    setBusy(false);
  }

  if (fields.length === 0) {
    return html`<p class="note">The model does not declare its inputs. See Code for a request to start from.</p>`;
  }
  return html`<form onSubmit=${submit}>
      ${fields.map((field, i) => html`<fieldset key=${field.name}>
        <legend>${field.name} <small>${field.datatype} ${field.anyRank ? "any shape" : `[${field.shape.join(", ")}]`}</small></legend>
        ${!examples.has(field.name) && model.example && html`<label class="inline"><input type="checkbox" checked=${field.isSent}
          onChange=${(e) => change(i, { isSent: e.target.checked })} /> send this optional input</label>`}
        ${field.isSent && html`<label for=${`data-${i}`}>values: rows of a table, or JSON</label>
        <textarea id=${`data-${i}`} rows="4" spellcheck="false" value=${field.text}
          onInput=${(e) => change(i, { text: e.target.value })}></textarea>
        <label class="inline">shape <input size="12" placeholder="from the values" value=${field.typedShape}
          onInput=${(e) => change(i, { typedShape: e.target.value })} /></label>`}
      </fieldset>`)}
      <button class="primary" disabled=${busy}>${busy ? "Running …" : "Run"}</button>
    </form>
    <div aria-live="polite">
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${answer?.notes.map((text) => html`<p class="note">${text}</p>`)}
      ${answer && html`<p class="note">${answer.ms.toFixed(1)} ms, request <code>${answer.id}</code></p>
        ${roundsIntegers && html`<p class="error">This browser rounds integers beyond 2^53.</p>`}
        ${answer.data.outputs.map((tensor) => html`<${Output} key=${tensor.name} tensor=${tensor} />`)}`}
    </div>`;
}
