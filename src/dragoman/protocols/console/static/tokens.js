// Generated tokens with their probabilities, as shade and as a table.
import { html } from "./html.js";

const MAX_LISTED = 500;

const isKnown = (logprob) => logprob !== null && logprob !== undefined;
const probability = (logprob) => Math.exp(logprob);

// Probable tokens are plain; the less likely one was, the darker its ground.
export function Tokens({ tokens }) {
  return tokens.map(({ text, logprob }) => (isKnown(logprob)
    ? html`<span class="token" style=${{ "--doubt": (1 - probability(logprob)).toFixed(3) }}
        title=${`probability ${probability(logprob).toPrecision(3)}`}>${text}</span>`
    : text));
}

export function TokenTable({ tokens }) {
  const known = tokens.filter(({ logprob }) => isKnown(logprob));
  if (known.length === 0) return null;
  return html`<details><summary>Probabilities</summary>
    <p class="note">Shade of the text: likely <span class="legend"></span> unlikely</p>
    <div class="scroll short" tabindex="0" role="region" aria-label="Probabilities of the tokens"><table>
      <thead><tr><th scope="col">token</th><th scope="col">probability</th><th scope="col">logarithm</th></tr></thead>
      <tbody>${known.slice(0, MAX_LISTED).map(({ text, logprob }) => html`<tr><td><code>${JSON.stringify(text)}</code></td>
        <td>${probability(logprob).toPrecision(3)}</td><td>${logprob.toFixed(3)}</td></tr>`)}</tbody></table></div></details>`;
}
