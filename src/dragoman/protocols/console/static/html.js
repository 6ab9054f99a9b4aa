// Preact with htm: `html` makes elements of the page from text, which is always escaped.
import { h, render } from "./preact.mjs";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./hooks.mjs";
import htm from "./htm.module.js";

export const html = htm.bind(h);
export { render, useEffect, useLayoutEffect, useMemo, useRef, useState };
