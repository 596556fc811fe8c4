"""The site from the notebooks: python nbs/docs/build.py [folder], or make docs.

Nothing is executed and nothing is fetched: pages show the outputs that the notebooks were stored with."""
import ast, json, math, os, re, shutil, sys, tempfile
from pathlib import Path
import api

HERE = Path(__file__).resolve().parent
NBS, ROOT = HERE.parent, HERE.parent.parent
JOBS = ['demo', 'train', 'evaluate', 'whiten', 'finetune_p'] # in this order, others after them
GUIDES = ['own_images', 'scale_out', 'add_trunk', 'add_dataset', 'add_table']
FOLDERS = dict(guides='Guides', explore='Explorers', studies='Studies', bench='Benchmarks', paper='The paper')
HIDDEN = 'docs', 'lab', 'images', 'readme' # folders of nbs without pages
LIVE = (':::{{tip}}\nThis page shows stored pictures. With sliders: `make lab`, then open `nbs/{}` '
        'and run its cells; without code: `make app`.\n:::')

def notebooks(folder='')->list: # paths relative to nbs, without the ending
    "The notebooks of a folder of nbs."
    return sorted(
        o.relative_to(NBS).with_suffix('').as_posix()
        for o in (NBS / folder).glob('*.ipynb')
        if not o.name.startswith(('_', '.'))
    )

def in_order(names:list, first:list)->list:
    "Names with some of them first."
    return sorted(names, key=lambda o: (first.index(Path(o).name) if Path(o).name in first else len(first), o))

def groups()->dict: # caption -> pages
    "All notebooks but the home page, in the order of the menu."
    top = [o for o in notebooks() if o != 'index']
    found = {
        'Guides': in_order(notebooks('guides'), GUIDES),
        'Components': [o for o in top if o[0].isdigit()],
        'Jobs': in_order([o for o in top if not o[0].isdigit()], JOBS),
    }
    order = api.Module(ROOT/'multigrain'/'studies.py').defined['NOTEBOOKS']
    found['The paper'] = in_order(notebooks('paper'), ast.literal_eval(order))
    known = {*FOLDERS, *HIDDEN}
    others = [o.name for o in sorted(NBS.iterdir()) if o.is_dir() and o.name[0] not in '_.' and o.name not in known]
    for folder in (*FOLDERS, *others): found.setdefault(FOLDERS.get(folder, folder.capitalize()), notebooks(folder))
    return {k: v for k, v in found.items() if v}

def read(name:str)->dict:
    "A notebook."
    return json.loads((NBS/f'{name}.ipynb').read_text(encoding='utf-8'))

def text(cell:dict)->str: return ''.join(cell['source'])

def title(name:str)->str:
    "The first heading of a notebook."
    return next(
        (
            line[2:].strip()
            for cell in read(name)['cells']
            if cell['cell_type'] == 'markdown'
            for line in text(cell).splitlines()
            if line.startswith('# ')
        ),
        Path(name).name,
    )

def links(md:str, page:str)->str:
    "Links that hold in the site: paths from the project's root, as the README needs them, become paths from the page."
    def fix(m):
        bang, words, to, mark = m.groups('')
        if re.match(r'[a-z]+:|#', to): return m[0]
        for base in ((NBS/page).parent, ROOT):
            file = Path(os.path.normpath(base/to))
            if not file.exists(): continue
            if file.is_relative_to(NBS) and (file.suffix == '.ipynb' or bang):
                return f'{bang}[{words}]({os.path.relpath(file, (NBS/page).parent)}{mark})'
            return words # a file of the project that is not a page
        raise SystemExit(f'nbs/{page}.ipynb links to {to}, which does not exist: correct the link')
    md = re.sub(
        r'(?<!\[)`nbs/([\w/]+)\.ipynb`',
        lambda m: f'[{m[0]}](nbs/{m[1]}.ipynb)' if (NBS / f'{m[1]}.ipynb').exists() else m[0],
        md,
    )
    return re.sub(r'(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)', fix, md)

def markdown(source:str, id:str)->dict: return dict(cell_type='markdown', id=id, metadata={}, source=source)

def page(name:str, more:list=())->dict: # notebook
    "A notebook as it is shown: no directives, no hidden cells, exported cells marked and reachable."
    cells, module = [], ''
    for cell in read(name)['cells']:
        source, id = text(cell), cell['id']
        if cell['cell_type'] == 'markdown': cells.append(markdown(links(source, name), id)); continue
        marks = re.findall(r'^#\|\s*(\w+):?\s*(.*)$', source, re.M)
        module = next((v for k, v in marks if k == 'default_exp'), module)
        source = re.sub(r'^#\|.*\n?', '', source, flags=re.M).strip('\n')
        kinds = {k for k, v in marks}
        outputs = [
            o for o in cell['outputs'] if 'application/vnd.jupyter.widget-view+json' not in o.get('data', {})
        ]
        if 'hide' in kinds or cell['cell_type'] == 'raw' or not (source or outputs): continue
        tags = [o.replace('_', '-') for o in cell['metadata'].get('tags', [])] + ['export']*('export' in kinds)
        if 'export' in kinds: cells.append(markdown(f'(cell-{id})=', f'to-{id}'))
        cells.append(cell | dict(source=source, outputs=outputs, metadata=dict(tags=tags)))
    where = (
        f'{{.mg-where}}\nThis page is the notebook `nbs/{name}.ipynb`'
        + (
            '; what it exports is '
            f'[multigrain.{module}]({os.path.relpath("api", Path(name).parent)}/{module}.md)'
            if module
            else ''
        )
        + '.'
    )
    if name.startswith('explore/'): where = LIVE.format(name + '.ipynb') + '\n\n' + where
    if name != 'index': cells.insert(1, markdown(where, 'where'))
    return dict(
        cells=[*cells, *more],
        metadata=dict(
            kernelspec=dict(display_name='python3', language='python', name='python3'),
            language_info=dict(name='python'),
        ),
        nbformat=4,
        nbformat_minor=5,
    )

def toctree(pages:list, caption:str='')->str:
    "A menu."
    return '\n'.join(
        ['```{toctree}', *([f':caption: {caption}'] if caption else []), ':hidden:', '', *pages, '```']
    )

HEAD = ['| claim | paper | here | 95 % interval | n | verdict |', '|---|---|---|---|---|---|']

def results(folder:Path, names:list)->dict: # name -> what `multigrain.page.write_result` has written
    "The results of a study, in the order of the notebooks."
    found = {o.stem: json.loads(o.read_text(encoding='utf-8')) for o in folder.glob('*.json')}
    return {o: found[o] for o in dict.fromkeys((*(Path(n).name for n in names), *sorted(found))) if o in found}

def claim(o:dict)->str: # row of a table
    "What was seen of one claim of the paper."
    low, high = o['effect'] - o['half'], o['effect'] + o['half']
    interval = '' if math.isnan(low) else f'{low:+.2f} to {high:+.2f}'
    return f"| {o['claim']} | {o['paper']} | {o['effect']:+.2f} {o['unit']} | {interval} | {o['n']} | {o['verdict']} |"

def result(name:str, r:dict, folder:Path, linked:bool)->list: # lines of Markdown
    "One table or figure of a study."
    where = f'; notebook [{name}]({name}.ipynb)' if linked else ''
    out = [f"## {r['title']}", '', f"{r['reference']}, made {r['made']}{where}.", '']
    if r['claims']: out += [*HEAD, *map(claim, r['claims']), '']
    if why := '; '.join(dict.fromkeys(filter(None, (o.get('why') for o in r['claims'])))):
        out += [f"Outside the paper's conditions: {why}.", '']
    out += [r['note'], '']
    if r['picture']: out += [f"![{r['title']}](results/{folder.name}/{r['picture']})", '']
    if r['table']: out += ['```{raw} html', '<div class="cell_output">', r['table'], '</div>', '```', '']
    return out

def study(folder:Path, names:list)->str: # Markdown
    "The results of one study: what the notebooks of the paper have left in data/paper."
    found = results(folder, names)
    data, seeds = next(iter(found.values()))['data'], max(o['seeds'] for o in found.values())
    lines = [line for o, r in found.items() for line in result(o, r, folder, f'paper/{o}' in names)]
    return '\n'.join([f'# Results of the study {folder.name}', '', f'> Up to {seeds} seeds, on `{data}`.', '', *lines])

def studies()->list: # of folders
    "Studies that have left results."
    return [o for o in sorted((ROOT/'data'/'paper').glob('*')) if o.name != 'smoke' and [*o.glob('*.json')]]

def paper(names:list)->str: # Markdown
    "The page of the paper: the claims of each study, the list of tables and figures."
    out = ['# The paper', '', '> Its tables and figures, made again by notebooks from the store of runs.', '']
    for folder in studies():
        rows = [f'| {o} {claim(c)}' for o, r in results(folder, names).items() for c in r['claims']]
        all_of_it = f'All tables and figures: [results of the study {folder.name}](results_{folder.name}.md).'
        out += [f'## Study {folder.name}', '', all_of_it, '', '| where ' + HEAD[0], '|---' + HEAD[1], *rows, '']
    out += ['', '## Tables and figures', '', *[f'- [{title(o)}]({Path(o).name}.ipynb)' for o in names]]
    pages = [*(f'results_{o.name}' for o in studies()), *(Path(o).name for o in names)]
    return '\n'.join([*out, '', toctree(pages)])

def write(file:Path, content:str):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content, encoding='utf-8')

def public_names(modules:list)->dict: # name -> full name
    "Names that code font turns into links: modules, and what one module alone has and no common word looks like."
    found, names = [api.Module(o) for o in modules], {}
    for m in found:
        names[f'multigrain.{m.name}'] = f'multigrain.{m.name}'
        for o in m.public:
            if sum(o in other.public for other in found) == 1 and (
                '_' in o.strip('_') or o[0].isupper() or o == 'gem'
            ):
                names[o] = f'multigrain.{m.name}.{o}'
    return names

def prepare(source:Path):
    "Write the pages for Sphinx."
    found, modules = groups(), sorted((ROOT/'multigrain').glob('[!_]*.py'))
    menu = {k: v for k, v in found.items() if k != 'The paper'}
    if (tables := found.get('The paper', [])) or studies():
        menu['The paper'] = ['paper/index']
        write(source/'paper'/'index.md', paper(tables))
        for o in studies():
            write(source/'paper'/f'results_{o.name}.md', study(o, tables))
            shutil.copytree(o, source/'paper'/'results'/o.name, ignore=shutil.ignore_patterns('*.json'))
    menu['Reference'] = ['api/index']
    for name in (o for v in found.values() for o in v): write(source/f'{name}.ipynb', json.dumps(page(name)))
    write(
        source / 'index.ipynb',
        json.dumps(page('index', [markdown('\n\n'.join(toctree(v, k) for k, v in menu.items()), 'menu')])),
    )
    for picture in (
        o for o in NBS.rglob('*') if o.suffix in ('.png', '.jpg', '.svg') and not o.is_relative_to(HERE)
    ):
        (source / picture.relative_to(NBS)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, source / picture.relative_to(NBS))
    titles, cells = {o: title(o) for o in notebooks()}, {
        c['id'] for o in found['Components'] for c in read(o)['cells']
    }
    order = [re.sub(r'^\d+[a-z]?_', '', o) for o in found['Components']]
    modules.sort(key=lambda o: order.index(o.stem) if o.stem in order else len(order))
    for o in modules: write(source/'api'/f'{o.stem}.md', api.page(o, titles, cells))
    write(source/'api'/'index.md', api.index(modules))
    write(source/'names.json', json.dumps(public_names(modules)))

def build(to:Path)->int: # exit code
    "Make the site; a warning is an error."
    from sphinx.cmd.build import main
    with tempfile.TemporaryDirectory() as d:
        source, made = Path(d)/'source', Path(d)/'site'
        prepare(source)
        code = main(
            [
                '-b',
                'html',
                '-q',
                '-W',
                '--keep-going',
                '-c',
                str(HERE),
                '-d',
                f'{d}/doctrees',
                str(source),
                str(made),
            ]
        )
        if code == 0: # a site that is there stays until the new one is whole
            shutil.rmtree(to, ignore_errors=True)
            shutil.move(made, to)
        return code

if __name__ == '__main__':
    to = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT/'_docs'
    if code := build(to): sys.exit(code)
    print(f'The site: {to/"index.html"}')
