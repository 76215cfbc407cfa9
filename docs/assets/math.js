// Typesets the formulas of a page: arithmatex leaves them in \( \) and \[ \].
document$.subscribe(({ body }) => {
  for (const formula of body.querySelectorAll(".arithmatex")) {
    renderMathInElement(formula, {
      delimiters: [
        { left: "\\(", right: "\\)", display: false },
        { left: "\\[", right: "\\]", display: true },
      ],
    });
  }
});
