// Addresses of the servers that the tests call, and helpers of all tests.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

export const { url, grpc, keyed } = JSON.parse(process.env.DRAGOMAN_ADDRESSES);
export const KEY = process.env.DRAGOMAN_KEY;
export const CALL = 'call weather {"city": "Oslo"}';
export const user = (content) => [{ role: "user", content }];

// Return the major version of an installed package.
export function major(name) {
  const file = createRequire(import.meta.url).resolve.paths("")[0] + `/${name}/package.json`;
  return Number(JSON.parse(readFileSync(file)).version.split(".")[0]);
}

// Return the items of an async iterable.
export async function collect(iterable) {
  const items = [];
  for await (const item of iterable) items.push(item);
  return items;
}
