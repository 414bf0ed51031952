// Everything in reading order; a click beside the dialog closes it.

showFigures();
showAgainst();
showSizes();
setUpLoss();
setUpTable();
showProvenance();
byId("detail").addEventListener("click", (event) => { if (event.target === byId("detail")) byId("detail").close(); });
byId("detail").addEventListener("close", hideTip);
document.documentElement.dataset.ready = "yes";
