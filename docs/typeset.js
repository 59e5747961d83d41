// Typeset the equations of a page: the fences ```math, which the build leaves as \[ … \].
for (const element of document.querySelectorAll(".arithmatex")) {
  const equation = element.textContent.trim().replace(/^\\\[|\\\]$/g, "");
  katex.render(equation, element, { displayMode: true, throwOnError: false });
}
