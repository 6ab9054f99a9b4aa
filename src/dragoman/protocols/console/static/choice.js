// A labelled choice of one of several options, which are shown by their `names` where they have any.
import { html } from "./html.js";

export function Choice({ label, value, options, names = {}, onChange }) {
  return html`<label>${label} <select value=${value} onChange=${(e) => onChange(e.target.value)}>
    ${options.map((option) => html`<option value=${option}>${names[option] ?? option}</option>`)}</select></label>`;
}
