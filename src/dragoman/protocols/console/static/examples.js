// Buttons that fill the form with the examples that a model ships.
import { html } from "./html.js";

const MAX_FILLED = 4096; // elements of an example that are all equal; more are not written into a form

const count = (shape) => shape.reduce((product, n) => product * n, 1);
const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)).buffer;
const canShow = ({ inputs }) => inputs.every(({ data, base64, fill, shape }) => data || base64?.length === 1 || (fill !== undefined && count(shape) <= MAX_FILLED));

// Return an example as one of an Open Inference request. Files have no data: `addFiles` puts them into the fields.
const requestOf = ({ inputs }) => ({
  inputs: inputs.map(({ base64, fill, ...tensor }) => ({ ...tensor, data: tensor.data ?? (base64 ? [] : Array(count(tensor.shape)).fill(fill)) })),
});

const addFiles = (fields, { name, inputs }) => fields.map((field) => {
  const found = inputs.find((tensor) => tensor.name === field.name && tensor.base64);
  return found ? { ...field, text: "", file: { name, bytes: bytesOf(found.base64[0]) } } : field;
});

// `fieldsOf`: makes the fields of a form from a model with an example; `onFields` receives them.
export function Examples({ model, fieldsOf, onFields }) {
  const shipped = (model.examples ?? []).filter(canShow);
  if (shipped.length === 0 || (shipped.length === 1 && shipped[0].name === "example")) return null; // the form has it already
  return html`<div class="row examples" role="group" aria-label="Examples"><span class="note">Examples</span>${shipped.map((example) => html`<button type="button"
    class="chip" onClick=${() => onFields(addFiles(fieldsOf({ ...model, example: requestOf(example) }), example))}>${example.name}</button>`)}</div>`;
}
