// Typesets the formulas and the tables of a page: arithmatex leaves formulas in \( \) and \[ \].
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
  // In a narrow column no line ends between a number and its unit.
  for (const cell of body.querySelectorAll("td, th")) {
    if (!cell.children.length) {
      cell.textContent = cell.textContent.replace(/(\d) (?=(%|[mµ]?s|[KMG]iB)$)/, "$1\u00a0");
    }
  }
});
