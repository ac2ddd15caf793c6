"""`variants.json` of the trial to `notebooks/data/h200_decode_attention.json`, as chapter 05e shows it."""

import json
import sys
from pathlib import Path

from minisgl.kernels.decode_attention import shape_of

found = json.loads(Path(sys.argv[1]).read_text())
cases = []
for c in found["results"]["cases"]:
    us, n = c["chain_us"], int(c["case"].split()[0])
    if "1 x 40000, " in c["case"]:
        n += int(c["case"].split(", ")[1].split()[0])
    (tile, warps, stages, early), parts = shape_of(n, c["heads"][1], itemsize=c["itemsize"])
    steps = {"before": us["old"]}
    if early:
        steps |= {s: us[w] for w, s in {"shared": "shared out", "early": "early"}.items() if w in us}
        steps["now"] = us["final"]
    else:  # the shape and number of parts that the kernel took after this trial
        way = f"tune {tile}-{warps}-{stages}-{round(parts * 8 / 132 + 0.3)} late m4"
        if way not in us:
            print("left out", c["case"], c["heads"], way)
            continue
        steps["now"] = us[way]
    cases.append({"case": c["case"], "heads": c["heads"], "bits": 8 * c["itemsize"], "chain_us": steps})
cases.sort(key=lambda c: (-c["bits"], c["heads"][0], "," in c["case"], int(c["case"].split()[0]), int(c["case"].split(",")[0].split()[2])))
found["results"] = {"cases": cases}
Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")
for c in cases: print(c["case"], c["heads"], c["bits"], c["chain_us"], round(c["chain_us"]["now"]/c["chain_us"]["before"]-1,3))
