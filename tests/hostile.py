"""Texts that do harm where they are taken for something else than text."""

HOSTILE = (
    "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 2'>",
    "{{constructor.constructor('window.harmed = 3')()}} ${window.harmed = 4} `x` @children",
    "# heading **bold** [link](javascript:window.harmed=5) | a | b |\n|---|---|",
    "\u202eright to left \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627\u202c 👩‍👩‍👧‍👦🏳️‍🌈 \x00\x1b[31m",
    "a" * 5000,
    "&lt;b&gt; \"quoted' &amp;",
)
