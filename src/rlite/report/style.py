"""Style sheet of the report, light and dark."""

CSS = """
:root { --page: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #667085; --rule: #e4e7ec; --good: #2e7d4f; --bad: #b3403a;
  --c0: #2f6fb2; --c1: #e0803a; --c2: #3a8f5c; --c3: #8a63b8; --c4: #c6485b; --c5: #2f9ea0; --c6: #a5a03a; --c7: #8d99ae; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --card: #1d2129; --ink: #e6e9ef; --soft: #98a2b3;
  --rule: #323843; --good: #6cc492; --bad: #e88a84; --c0: #6aa8e8; --c1: #f0a265; --c2: #6cc08c; --c3: #b795e0;
  --c4: #e57f8e; --c5: #62c6c8; --c6: #cdc865; --c7: #a9b3c6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 36px 0 12px; } h3 { font-size: 15px; margin: 0; }
.sub { color: var(--soft); margin: 2px 0 20px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; }
.tile, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 21px; white-space: nowrap; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span, .note, .meta { color: var(--soft); font-size: 13px; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 14px; }
.note { margin: 0 0 6px; }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--rule); stroke-width: 1; } .tick { fill: var(--soft); font-size: 11.5px; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .faint { opacity: .28; stroke-width: 1.2; }
.band { opacity: .14; stroke: none; } .layer { opacity: .85; stroke: none; } .hover { fill: transparent; }
.hover:hover { fill: var(--ink); fill-opacity: .35; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft); padding-left: 44px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.sample { margin-bottom: 10px; } .sample header { display: flex; gap: 12px; align-items: baseline; flex-wrap: wrap; }
.reward { font-weight: 650; font-variant-numeric: tabular-nums; } .good { color: var(--good); } .bad { color: var(--bad); }
pre { margin: 8px 0 0; padding: 10px 12px; background: var(--page); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; max-height: 320px; overflow: auto; }
pre .prompt { color: var(--soft); }
details summary { cursor: pointer; color: var(--soft); margin-top: 30px; }
""" + "\n".join(
    f".c{n}.line, .c{n}.dot {{ stroke: var(--c{n}); }} .c{n}.band, .c{n}.layer, .c{n}.dot {{ fill: var(--c{n}); }} "
    f"i.c{n} {{ background: var(--c{n}); }}"
    for n in range(8)
)
