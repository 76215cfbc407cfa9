// Typesets the formulas, the tables, the outputs and the figures of a page: arithmatex leaves formulas in \( \) and \[ \].
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
  // A figure opens in its own size: on a telephone its panels are small.
  for (const picture of body.querySelectorAll(".md-content img")) {
    if (!picture.closest("a")) {
      const link = document.createElement("a");
      link.href = picture.src;
      picture.replaceWith(link);
      link.append(picture);
    }
  }
  // In a table, code breaks after a bracket, an underscore or the dot of a long name, not within a word.
  for (const code of body.querySelectorAll("td code, th code")) {
    const parts = code.textContent.split(/(?<=[(_,]|\w{4}\.)(?=[\p{L}\p{N}])|(?<==)(?=")|(?<=\p{Ll})(?=\p{Lu})/u);
    if (!code.children.length && parts.length > 1) {
      code.replaceChildren(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
    }
  }
  // An empty line of an output, as doctest writes it, and options of doctest, which are no part of the code.
  for (const part of body.querySelectorAll(".go, .c1")) {
    if (/^(<BLANKLINE>$|# doctest:)/.test(part.textContent)) {
      part.textContent = "";
    }
  }
  // In a narrow column no line ends between a number and its unit, nor within a power of ten or a range.
  for (const cell of body.querySelectorAll("td, th")) {
    if (!cell.children.length) {
      cell.textContent = cell.textContent
        .replace(/(\d) (?=(%|[mµ]?s|[KMG]iB)$)/, "$1\u00a0")
        .replace(/(\de-|\d–)(?=\d)/g, "$1\u2060");
    }
  }
});
