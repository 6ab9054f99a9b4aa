// A labelled choice of one of several names.
import { html } from "./html.js";

export function Choice({ label, value, options, onChange }) {
  return html`<label>${label} <select value=${value} onChange=${(e) => onChange(e.target.value)}>
    ${options.map((name) => html`<option>${name}</option>`)}</select></label>`;
}
