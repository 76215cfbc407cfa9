// Typesets the formulas of a page: arithmatex leaves them in \( \) and \[ \].
document$.subscribe(({ body }) => {
  for (const formula of body.querySelectorAll(".arithmatex")) {
    renderMathInElement(formula, {
      delimiters: [
        { left: "\\(", right: "\\)", display: false },
        { left: "\\[", right: "\\]", display: true },
      ],
    });
    // No line begins with the comma or the colon that follows a formula.
    const next = formula.nextSibling;
    const sign = next?.nodeType === Node.TEXT_NODE && next.data.match(/^[^\s\p{L}\p{N}]+/u);
    if (sign && formula.localName === "span") {
      const whole = document.createElement("span");
      whole.className = "formula-and-sign";
      formula.replaceWith(whole);
      next.data = next.data.slice(sign[0].length);
      whole.append(formula, sign[0]);
    }
  }
});
