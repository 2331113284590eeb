// What every module of the page writes elements with: Preact, its hooks, and `html` for templates.
//
// `html` makes elements and text nodes, never markup, so a text from an agent stays a text. Nothing here or in a view
// uses innerHTML; the browser refuses it, too (the policy's `require-trusted-types-for`).
import htm from "./vendor/htm.js";
import { Component, Fragment, h, render } from "./vendor/preact.js";

export { Component, Fragment, h, render };
export {
  useCallback,
  useEffect,
  useErrorBoundary,
  useId,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "./vendor/hooks.js";

export const html = htm.bind(h);
