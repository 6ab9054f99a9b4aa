// Preact with htm: `html` makes elements of the page from text, which is always escaped.
import { h, render } from "./preact.mjs";
import { useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./hooks.mjs";
import htm from "./htm.module.js";

export const html = htm.bind(h);
export { render, useEffect, useLayoutEffect, useMemo, useRef, useState };

// A part of the page that fails says so; the others still work.
export function Guarded({ children }) {
  const [error] = useErrorBoundary((found) => console.error(found));
  return error ? html`<p class="error" role="alert">This part of the page has failed: ${error.message}</p>` : children;
}

// An error that another try may end.
export const Problem = ({ message, onRetry }) => html`<p class="error" role="alert">${message} <button type="button" onClick=${onRetry}>Try again</button></p>`;

// A component of a module that is loaded when it is shown first.
export function lazy(load, name) {
  let Component = null;
  return function Lazy(props) {
    const [isLost, setIsLost] = useState(false);
    const [, setIsLoaded] = useState(Component !== null);
    useEffect(() => {
      // Another use of it may have loaded it since this one was rendered.
      if (Component) return setIsLoaded(true);
      load().then((module) => ((Component = module[name]), setIsLoaded(true)), () => setIsLost(true));
    }, []);
    if (isLost) return html`<${Problem} message="This part of the page could not be loaded." onRetry=${() => location.reload()} />`; // browsers keep the failure
    return Component ? html`<${Component} ...${props} />` : html`<p class="note">Loading …</p>`;
  };
}
