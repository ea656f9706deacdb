// Short forms for the document.

export const by = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  // An element; `class` and other attributes by name. Children are elements or text, never markup.
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
