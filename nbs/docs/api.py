"API pages: signatures, comments and docstrings of the public names, read from the text of the modules."
import ast, io, json, re, tokenize
from pathlib import Path

class Module:
    "The text of a module, and what stands where in it."
    def __init__(self, file):
        self.name, text = Path(file).stem, Path(file).read_text(encoding='utf-8')
        self.tree, self.lines = ast.parse(text), text.splitlines()
        self.tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        self.notes = {t.start[0]: t.string.lstrip('#').strip() for t in self.tokens if t.type == tokenize.COMMENT}
        self.defined, self.attached = {}, {}
        for node in self.tree.body:
            if owner := patched(node): self.attached.setdefault(owner, {})[node.name] = node
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)): self.defined[node.name] = node
            elif isinstance(node, ast.Assign):
                for target, value in pairs(node):
                    if isinstance(target, ast.Name): self.defined[target.id] = value
        self.public = ast.literal_eval(self.defined['__all__'])

    def cell(self, node):
        "Notebook and cell that a line of the module comes from."
        for line in reversed(self.lines[:node.lineno]):
            if m := re.match(r'# %% \.\./nbs/(\S+)\.ipynb #(\w+)', line): return m.groups()

def patched(node)->str: # '' if it is not
    "The class that a function is added to with `@patch`."
    names = [ast.unparse(o).split('(')[0] for o in getattr(node, 'decorator_list', [])]
    return ast.unparse(node.args.args[0].annotation) if 'patch' in names else ''

def pairs(node:ast.Assign):
    "Names and values of an assignment, one by one."
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            yield from zip(
                target.elts,
                node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(target.elts),
            )
        else: yield target, node.value

def prose(text:str)->str:
    "Plain text for Markdown: a name in angle brackets is not a tag."
    return ''.join(
        o if i % 2 else o.replace('<', r'\<')
        for i, o in enumerate(re.split(r'(`[^`]*`)', ' '.join(text.split())))
    )

def signature_end(m:Module, f:ast.FunctionDef)->int:
    "The line of the colon after a signature."
    depth = 0
    for t in m.tokens:
        if t.start[0] < f.lineno or t.type != tokenize.OP: continue
        depth += (t.string in '([{') - (t.string in ')]}')
        if t.string == ':' and depth == 0: return t.start[0]

def without_self(args:ast.arguments)->ast.arguments:
    "Arguments that a caller gives."
    keep = [o for o in args.args if o.arg not in ('self', 'cls')]
    return ast.arguments(
        posonlyargs=args.posonlyargs,
        args=keep,
        vararg=args.vararg,
        kwonlyargs=args.kwonlyargs,
        kw_defaults=args.kw_defaults,
        kwarg=args.kwarg,
        defaults=args.defaults,
    )

def items(m:Module, f:ast.FunctionDef)->list: # lines of Markdown
    "What the comments say about the arguments, line by line as in the source, and about what is returned."
    a, end, by_line = without_self(f.args), signature_end(m, f), {}
    for o in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg):
        if o:
            by_line.setdefault(o.lineno, []).append(
                ('*' if o is a.vararg else '**' if o is a.kwarg else '') + o.arg
            )
    said = [
        f'- {", ".join(f"**`{n}`**" for n in names)}: {prose(m.notes[line])}'
        for line, names in by_line.items()
        if line != end and line in m.notes
    ]
    return said + ([f'- *returns* {prose(m.notes[end])}'] if end in m.notes else [])

def fields(m:Module, c:ast.ClassDef)->tuple: # signature, lines of Markdown
    "Fields of a dataclass or a named tuple."
    found = [o for o in c.body if isinstance(o, ast.AnnAssign)]
    sig = ', '.join(
        f'{o.target.id}: {ast.unparse(o.annotation)}' + (f' = {ast.unparse(o.value)}' if o.value else '')
        for o in found
    )
    return sig, [f'- **`{o.target.id}`**: {prose(m.notes[o.lineno])}' for o in found if o.lineno in m.notes]

def directive(kind:str, head:str, options:list, body:list, fence:str=':::')->list:
    "Lines of a directive in Markdown."
    return [f'{fence}{{py:{kind}}} {head}', *options, '', *body, fence, '']

def function(m:Module, name:str, f:ast.FunctionDef, kind:str='function', options=(), tail=(), fence=':::')->list:
    "Lines about a function or a method."
    if kind == 'property':
        head, said = name, []
    else:
        head, said = f'{name}({ast.unparse(without_self(f.args))})' + (
            f' -> {ast.unparse(f.returns)}' if f.returns else ''
        ), items(m, f)
    return directive(kind, head, options, [*tail, prose(ast.get_docstring(f) or ''), '', *said, ''], fence)

def member(m:Module, name:str, value, fence:str)->list:
    "Lines about a method: from the body of the class, or attached to it afterwards."
    kinds = {
        'property': ('property', ()),
        'classmethod': ('method', (':classmethod:',)),
        'staticmethod': ('method', (':staticmethod:',)),
    }
    kind, options = 'method', ()
    for o in getattr(value, 'decorator_list', []): kind, options = kinds.get(ast.unparse(o), (kind, options))
    return (
        function(m, name, value, kind, options, fence=fence)
        if isinstance(value, ast.FunctionDef) and ast.get_docstring(value)
        else []
    )

def klass(m:Module, c:ast.ClassDef, tail:list)->list:
    "Lines about a class."
    init = next((o for o in c.body if isinstance(o, ast.FunctionDef) and o.name == '__init__'), None)
    sig, said = (ast.unparse(without_self(init.args)), items(m, init)) if init else fields(m, c)
    methods = {o.name: o for o in c.body if isinstance(o, ast.FunctionDef)} | m.attached.get(c.name, {})
    inner = [line for k, v in methods.items() if not k.startswith('_') for line in member(m, k, v, ':::')]
    return directive(
        'class',
        f'{c.name}({sig})' if sig else c.name,
        (),
        [*tail, prose(ast.get_docstring(c) or ''), '', *said, '', *inner],
        '::::',
    )

def page(file, titles:dict, cells:set)->str: # Markdown; titles of notebooks, and the cells that can be linked
    "The API page of a module."
    m = Module(file)
    first = m.cell(m.defined[m.public[0]])[0]
    out = [
        f'# multigrain.{m.name}',
        '',
        f'> {prose(ast.get_docstring(m.tree) or "")}',
        '',
        '{.mg-where}',
        f'Derived, shown and tested in the notebook [{titles[first]}](../{first}.ipynb).',
        '',
        ':::{py:module} multigrain.' + m.name,
        ':::',
        '',
    ]
    for name in m.public:
        node = m.defined[name]
        _, cell = m.cell(node)
        tail = (
            ['{.mg-source}', f'[in the notebook](#cell-{cell})', ''] if cell in cells else []
        )  # a notebook may be ahead of its module
        if isinstance(node, ast.FunctionDef): out += function(m, name, node, tail=tail)
        elif isinstance(node, ast.ClassDef): out += klass(m, node, tail)
        else:
            value = ast.unparse(node)
            out += directive(
                'data',
                name,
                [f':value: {json.dumps(value)}'] if len(value) <= 100 else [],
                [*tail, prose(m.notes.get(node.lineno, ''))],
            )
    return '\n'.join(out)

def index(files)->str: # Markdown
    "The page that lists the modules."
    rows = [
        f'| [`multigrain.{Path(o).stem}`]({Path(o).stem}.md) | '
        f'{prose(ast.get_docstring(ast.parse(Path(o).read_text(encoding="utf-8"))) or "")} |'
        for o in files
    ]
    return '\n'.join(
        [
            '# API',
            '',
            '> Every public name: its signature, its arguments, what comes back, and where it is derived and tested.',
            '',
            '| module | |',
            '|---|---|',
            *rows,
            '',
            '```{toctree}',
            ':hidden:',
            '',
            *[Path(o).stem for o in files],
            '```',
            '',
        ]
    )
