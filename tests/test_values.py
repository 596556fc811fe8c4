"The layer that makes the numbers, by value: recipe, studies, claims. Each test names the mistake that it would catch."
import dataclasses, inspect, json, math
from pathlib import Path

import numpy as np, pytest, torch
from multigrain.benchmark import recommend, some_images, two_parts
from multigrain.claims import length_words, registered, rule_arms, rules
from multigrain.datasets import read_split, split_names, training_sets, world_folder
from multigrain.embed import embed
from multigrain.evaluate import accuracy, copydays_map, nearest_neighbours
from multigrain.model import MultiGrain
from multigrain.recipe import PRESETS, Recipe, make_recipe, parameters
from multigrain.runs import Run, run_folder
from multigrain.studies import ARMS, PS, STUDIES, arm_recipe, asks, find_study, measure_set, open_set
from multigrain.whiten import Whitening, left_out, phi

ROOT = Path(__file__).resolve().parent.parent

PAPER = dict( # section 4.1, table B.1 and C.1; momentum and weight decay from the published code
    trunk='resnet50', pretrained=False, lam=.5, p=3., learn_p=False, m=3, augmentation='full', min_crop=.08,
    resolution=224, batch_size=512, iterations=5005, epochs=120, lr=.2, drops=(30, 60, 90), warmup=0., momentum=.9,
    weight_decay=1e-4, beta=1.2, beta_lr=.1, normalize='pairs', sampling='exact', same_class='allow')

def test_recipe_is_the_papers():
    recipe = dataclasses.asdict(make_recipe('paper', data='x'))
    assert {k: recipe[k] for k in PAPER} == PAPER
    others = dict(data='x', batch_norm='group', gather=False, accumulate=1, precision='float32', compile=False,
                  exact=True, bad='raise', seed=0, preset='paper', group=128, bn_steps=0, schedule='drops',
                  head_lr=1., patience=0)
    assert {k: v for k, v in recipe.items() if k not in PAPER} == others, 'a new field: is its default the paper?'
    assert make_recipe('paper', data='x', augmentation='AA').iterations == 7508

def test_recipe_drops_are_where_the_paper_says():
    "Not one epoch later, as in the published code."
    from multigrain.training import lr_factor
    r = make_recipe('paper', data='x')
    for drop, factor in zip(r.drops, (.1, .01, .001)):
        assert lr_factor(drop - 1, r.iterations - 1, r.iterations, r.drops) == pytest.approx(10*factor)
        assert lr_factor(drop, 0, r.iterations, r.drops) == pytest.approx(factor)

def test_recipe_rates_of_what_is_learned():
    "beta's rate is absolute, and neither beta nor p decays; everything else does."
    from multigrain.loss import JointLoss
    from multigrain.training import parameter_groups
    for lr in (.2, .05):
        r = make_recipe('smoke', lr=lr, learn_p=True)
        groups = parameter_groups(MultiGrain('mini', n_classes=3, learn_p=True), JointLoss(.5), r)
        found = {o['name']: (o['lr'], o['weight_decay']) for o in groups}
        assert found == dict(weights=(lr, r.weight_decay), p=(lr, 0.), beta=(.1, 0.))

def test_recipe_momentum_and_decay_reach_the_optimizer():
    "Two steps of a training's own optimizer, by hand."
    from multigrain.training import Learner
    paper = dataclasses.asdict(make_recipe('paper', data='x'))
    r = dataclasses.replace(make_recipe('smoke'), **{o: paper[o] for o in ('lr', 'momentum', 'weight_decay')})
    learner = Learner(r, 3)
    sgd, w = learner.optimizer, learner.model.classifier.weight
    w.data.fill_(1.)
    v, x = 0., 1.
    for g in (.5, -.25):
        w.grad = torch.full_like(w, g); sgd.step()
        v = .9*v + g + 1e-4*x
        x -= .2*v
    assert w.detach().numpy() == pytest.approx(x, abs=1e-6)

def test_recipe_of_every_preset_is_complete():
    for name in PRESETS: assert isinstance(make_recipe(name, data='smoke'), Recipe)

SMALL = dict( # preset -> what it changes; the demo, the guides and committed runs stand on these
    mini=dict(data='world', trunk='mini', m=2, min_crop=.5, resolution=48, batch_size=24, iterations=120, epochs=40,
              lr=.035, schedule='cosine', drops=(), warmup=3., weight_decay=5e-4, same_class='exclude'),
    smoke=dict(data='smoke', trunk='mini', resolution=32, batch_size=24, iterations=4, epochs=2, lr=.05, drops=(1,)))

@pytest.mark.parametrize('preset', SMALL)
def test_recipe_of_small_presets(preset):
    "A preset that drifts would give old names to other runs."
    recipe = dataclasses.asdict(make_recipe(preset))
    usual = dataclasses.asdict(Recipe(data='x')) | dict(preset=preset)
    assert {k: v for k, v in recipe.items() if v != usual[k]} == {
        k: v for k, v in SMALL[preset].items() if v != usual[k]}

def test_recipe_of_the_demo_has_its_record():
    "The demo compares with a stored run of its own recipe at lam=1; without it, it would show nothing beside."
    folder = run_folder('demo', parameters(make_recipe('mini', lam=1.)), ROOT/'data/paper/store')
    run = Run(folder)
    assert run.complete and len(run.metrics) == make_recipe('mini').epochs
    scores = json.loads((folder/'demo.json').read_text())
    assert scores['top-1'] == pytest.approx(100*run.result['val_top1'])
    assert {'Holidays mAP', 'UKBench', 'Copydays mAP', 'IN-aug'} < scores.keys()

# Studies

COMMON = { # study -> seeds, images of a class for IN-aug, and what its runs have in common beyond the paper's recipe
    'smoke': (2, 2, dict(SMALL['smoke'], m=2)),
    'mini': (3, 10, dict(trunk='mini', m=2, min_crop=.5, resolution=32, batch_size=32, iterations=100, epochs=36,
                         lr=.02, drops=(24, 33), warmup=2., weight_decay=5e-4, exact=False)),
    'tiny': (3, 5, dict(trunk='small', min_crop=.08, resolution=32, batch_size=128, iterations=156, epochs=24, lr=.05,
                        drops=(12, 19), warmup=2., weight_decay=5e-4)),
    'claims': (8, 5, dict(trunk='small8', min_crop=.08, resolution=28, batch_size=84, iterations=168, epochs=30, lr=.1,
                          drops=(15, 22, 27), warmup=0., weight_decay=5e-4, group=42)),
    'cifar': (6, 5, dict(trunk='small8', min_crop=.08, resolution=28, batch_size=84, iterations=168, epochs=30, lr=.1,
                         drops=(15, 22, 27), warmup=0., weight_decay=5e-4, group=42)),
    'pilots': (4, 5, dict(trunk='small8', min_crop=.08, resolution=28, batch_size=84, iterations=168, epochs=30, lr=.1,
                          drops=(15, 22, 27), warmup=0., weight_decay=5e-4, group=42)),
    'paper': (1, 2, dict(group=128, batch_norm='group'))}

@pytest.mark.parametrize('name', STUDIES)
def test_studies_recipes_by_value(name):
    "A number of a study that drifts would not be noticed by any of its tables."
    study = dataclasses.replace(STUDIES[name], data='x')
    seeds, per_class, common = COMMON[name]
    assert (study.seeds, study.per_class) == (seeds, per_class)
    recipe = dataclasses.asdict(arm_recipe(study, 'MultiGrain p=3', 5))
    usual = dataclasses.asdict(Recipe(data='x', seed=5)) | dict(preset=study.preset)
    expected = {k: v for k, v in common.items() if k != 'data' and v != usual[k]}
    assert {k: v for k, v in recipe.items() if v != usual[k]} == expected

ELSEWHERE = {'lam=0.1': (.1, 3, 3.), 'lam=0.9': (.9, 3, 3.), 'RA m=2': (1., 2, 3.), 'RA m=3': (1., 3, 3.),
             'RA m=5': (1., 5, 3.), 'published sampling': (.5, 3, 3.), 'learned p': (.5, 3, 3.),
             'uniform short': (1., 1, 1.), 'RA short': (1., 3, 1.), 'uniform long': (1., 1, 1.), 'RA long': (1., 3, 1.),
             'uniform, batch x 3': (1., 1, 1.)}

@pytest.mark.parametrize('arm', ELSEWHERE)
def test_studies_other_arms_are_what_they_are_called(arm):
    larger = 'batch' in arm # three times that of the study it belongs to
    r = arm_recipe(find_study('pilots') if larger else find_study('paper', str(ROOT)), arm, 0)
    assert (r.lam, r.m, r.p) == ELSEWHERE[arm]
    assert r.learn_p == (arm == 'learned p') and (r.sampling == 'published') == (arm == 'published sampling')
    own = {'short': (10, (5, 7, 9)), 'long': (45, (22, 33, 40))}.get(arm.split()[-1], (120, (30, 60, 90)))
    assert (r.epochs, r.drops) == ((30, (15, 22, 27)) if larger else own)
    assert r.batch_size == (3*arm_recipe(find_study('pilots'), 'uniform p=1', 0).batch_size if larger else 512)
    assert {*ELSEWHERE, *TABLE} == {*ARMS}

TABLE = { # arm -> what differs from the study, in the words of the paper's table 2
    'uniform p=1': (1., 1, 1.), 'uniform p=3': (1., 1, 3.), 'RA p=1': (1., 3, 1.), 'RA p=3': (1., 3, 3.),
    'MultiGrain p=1': (.5, 3, 1.), 'MultiGrain p=3': (.5, 3, 3.), 'AA p=1': (.5, 3, 1.), 'AA p=3': (.5, 3, 3.)}

@pytest.mark.parametrize('arm', TABLE)
def test_studies_arms_are_what_they_are_called(arm):
    r = arm_recipe(find_study('paper', str(ROOT)), arm, 0)
    assert (r.lam, r.m, r.p, r.augmentation) == (*TABLE[arm], 'AA' if arm.startswith('AA') else 'full')
    assert r.iterations == (7508 if arm.startswith('AA') else 5005)

def test_studies_differ_in_one_thing_at_a_time():
    for study in STUDIES.values():
        study = dataclasses.replace(study, data=study.data or 'x')
        ladder = [arm_recipe(study, o, 3) for o in ('uniform p=1', 'RA p=1', 'MultiGrain p=1', 'MultiGrain p=3')]
        changed = [{f.name for f in dataclasses.fields(a) if getattr(a, f.name) != getattr(b, f.name)}
                   for a, b in zip(ladder, ladder[1:])]
        assert changed == [{'m'}, {'lam'}, {'p'}], study.name

def test_studies_resolutions():
    assert {k: o.s for k, o in STUDIES.items()} == dict(smoke=(32, 48), mini=(32, 48, 64), tiny=(32, 48, 64),
                                                         claims=(28, 42, 56), cifar=(28,), pilots=(28,),
                                                         paper=(224, 500, 800))
    for study in STUDIES.values():
        assert study.s[0] == arm_recipe(dataclasses.replace(study, data='x'), 'RA p=1', 0).resolution

def test_studies_records_keep_their_names():
    "A committed record is found by the hash of its own parameters."
    from multigrain.runs import Run, run_hash
    records = sorted((ROOT/'data/paper/store').glob('*/run.json'))
    assert len(records) >= 15
    for o in records: assert o.parent.name.split('-')[1] == run_hash(Run(o.parent).parameters)

@pytest.fixture(scope='module')
def smoke(): return find_study('smoke')

def test_studies_in_aug_is_made_of_training_images(smoke):
    learn, val = training_sets('smoke')
    found = open_set(smoke, 'in_aug').images
    assert set(found.paths) <= set(learn.paths) and not set(found.paths) & set(val.paths)
    assert len(found) == 5*2*len(learn.classes)

@pytest.mark.parametrize('name', ['holidays', 'ukbench', 'copydays'])
def test_studies_whitening_is_learned_elsewhere(smoke, name):
    found = open_set(smoke, name)
    assert not set(found.whiten.paths) & set(found.images.paths)
    assert {Path(o).parent for o in found.whiten.paths} == {world_folder('smoke')/'whiten'}

@pytest.fixture(scope='module')
def net(): return MultiGrain('mini', 3., 4, seed=1).eval()

@pytest.mark.parametrize('s,square', [(32, True), (48, False)])
def test_studies_values_of_accuracy(smoke, net, s, square):
    "Square crops at the training resolution, whole images above it; every exponent."
    found = open_set(smoke, 'val')
    rows = {(o.set, o.p): o.value for o in measure_set(net, smoke, 'val', s, found)}
    for p in (1., 3., 10.):
        logits = embed(net, found.images, s, square, p, logits=True, progress=False).logits
        assert rows['val top-1', p] == accuracy(logits, found.images.labels, [1])['top-1'].value
    assert {o[1] for o in rows} == set(map(float, range(1, 11)))

@pytest.mark.parametrize('s,square', [(32, True), (48, False)])
@pytest.mark.parametrize('name', ['val', 'copydays'])
def test_studies_crop_only_at_the_training_resolution(smoke, net, monkeypatch, name, s, square):
    "Scores of so few images could be equal by chance, so the protocol itself is looked at."
    import multigrain.studies as studies
    seen, real = [], studies.score_benchmark
    def spy(*args, **more):
        seen.extend(found := real(*args, **more))
        return found
    monkeypatch.setattr(studies, 'score_benchmark', spy)
    measure_set(net, smoke, name, s, open_set(smoke, name), [1.])
    assert seen and all(o.protocol['square'] == square and o.protocol['s'] == s for o in seen)

def test_studies_values_of_retrieval(smoke, net):
    "Plain and whitened at the same exponent, the whitening from its own images."
    found = open_set(smoke, 'copydays')
    rows = {(o.p, o.dims): o.value for o in measure_set(net, smoke, 'copydays', 48, found)}
    x, w = (embed(net, o, 48, False, 2., progress=False).embedding for o in found)
    white = Whitening.fit(torch.tensor(np.asarray(w)), net.dim, 'oas') # twelve images, 128 dimensions
    assert rows[2., 0] == copydays_map(x, found.images).value
    assert rows[2., net.dim] == copydays_map(white.transform(torch.tensor(np.asarray(x))), found.images).value

def test_studies_keep_the_chosen_shrinkage_beside(smoke, net, tmp_path):
    "Rows under another name: the whitening that the library would use, from the same vectors."
    from multigrain.studies import network_scores
    found, study = open_set(smoke, 'copydays'), dataclasses.replace(smoke, s=(48,))
    rows = network_scores(tmp_path, lambda: net, study, ['copydays'], 'smoke')
    x, w = (torch.tensor(np.asarray(embed(net, o, 48, False, 2., progress=False).embedding)) for o in found)
    def score(shrinkage): return copydays_map(Whitening.fit(w, net.dim, shrinkage).transform(x), found.images).value
    at = {(o.set, o.dims): o.value for o in rows if o.p == 2.}
    assert at == {('copydays', 0): copydays_map(x, found.images).value, ('copydays', net.dim): score('oas'),
                  ('copydays shrunk', net.dim): score(None)}

# The exponent

def test_value_of_finetuned_p_with_momentum(net):
    "Two steps by hand: the paper's rate, its decay and momentum 0.9."
    from multigrain.resolution import finetune_p, poly_lr
    learn, _ = training_sets('smoke')
    few = learn.take(np.concatenate([np.flatnonzero(learn.labels == c)[:2] for c in range(4)]))
    curve = finetune_p(net, few, 48, per_class=2, batch_size=4, lr=.5, progress=False)
    p = [*curve.curve.p, curve.p]
    assert len(p) == 3
    assert curve.curve.lr.tolist() == pytest.approx([poly_lr(0, 2, .5), poly_lr(1, 2, .5)]) == [.5, .5*.5**.9]
    first, second = p[1] - p[0], p[2] - p[1]
    g = -first/.5 # the first step is the gradient alone
    plain = finetune_p(net, few, 48, per_class=2, batch_size=4, lr=.5, momentum=0., progress=False)
    assert plain.curve.p[1] == pytest.approx(p[1], abs=1e-6) # the same point, so the same second gradient
    g2 = -(plain.p - plain.curve.p[1])/plain.curve.lr[1]
    assert abs(.9*g) > 1e-4 and second == pytest.approx(-curve.curve.lr[1]*(.9*g + g2), abs=1e-5)

# Negatives

def test_value_of_negatives_each_positive_has_its_own():
    "j* ~ p(.|i) is drawn for each pair: an anchor with four positives does not share one negative."
    from multigrain.margin import MarginLoss
    m, images = 5, 40
    loss, e = MarginLoss(max_distance=None), torch.eye(m*images)[:, :200] # all at one distance: negatives are uniform
    instance = torch.arange(m*images)//m
    loss(e, instance, generator=torch.Generator().manual_seed(0))
    pairs = loss.pairs
    for i in range(0, m*images, 20):
        drawn = pairs.negative[pairs.anchor == i]
        assert len(drawn) == m - 1 and (instance[drawn] != instance[i]).all()
    same = np.mean([len(set(pairs.negative[pairs.anchor == i].tolist())) == 1 for i in range(m*images)])
    assert same < .05

# Claims

def test_claims_conditions_of_the_paper_hold_for_the_paper():
    "The paper's own values are within all bounds, those of the small studies are not."
    known = json.loads((ROOT/'data/claims.json').read_text())
    for name, o in known['conditions'].items():
        if name == 'seeds' or o['paper'] is None: continue # the paper has one seed; it prints no training accuracy
        assert o.get('least', -math.inf) <= o['paper'] <= o.get('most', math.inf), name
    assert {o for names in known['kinds'].values() for o in names} <= set(known['conditions'])
    assert set(ARMS) >= {'uniform p=1', 'RA p=1', 'MultiGrain p=1', 'MultiGrain p=3'}

def test_claims_length_of_a_training_that_is_just_enough():
    "The registered bound itself is still long enough."
    assert length_words(.5, .5) == '' and 'by 0.6 points' in length_words(.6, .5)

# Survivors of `make mutants`: each test here was written for a mistake that nothing noticed

def test_whiten_left_out_is_a_fit_without_the_image():
    "A dozen images, so that every term counts: the formula against fits that did not see the image."
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    w = Whitening.fit(x, shrinkage=0.)
    z = phi(x, w.mean, w.S)
    lengths = z.norm(dim=1)
    cosines = (z @ z.T)/lengths[:, None]/lengths
    found = left_out(cosines, lengths, lengths, len(x), 0.)
    for i in range(len(x)):
        rest = torch.arange(len(x)) != i
        o = Whitening.fit(x[rest], shrinkage=0.)
        a, b = phi(x[i:i + 1], o.mean, o.S), phi(x[rest], o.mean, o.S)
        assert torch.allclose(found[i, rest], torch.cosine_similarity(a, b), atol=1e-5)

def test_whiten_lengths_of_a_whitening_that_was_not_fitted():
    "A published whitening does not say how much of the variance it keeps: all of it, then."
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
    w = Whitening.fit(x, shrinkage=0.)
    alone = Whitening(w.mean, w.S)
    z = phi(x, w.mean, w.S)
    assert alone.kept is None
    assert torch.allclose(alone.lengths(z/z.norm(dim=1, keepdim=True)).to(z), z.norm(dim=1), rtol=1e-4)

def test_benchmark_settings_that_are_tried():
    "What `recommend` tries where nothing is given, and how many images are enough."
    given = {k: v.default for k, v in inspect.signature(recommend).parameters.items()}
    assert given['s'] == (224, 448) and given['ps'] == (1., 2., 3., 5.) and given['most'] == 1000
    assert given['square'] == (True, False) and given['whiten'] == (False, True) and given['slack'] == .25
    assert inspect.signature(some_images).parameters['most'].default == 2000

def test_benchmark_groups_of_eight_are_cut():
    "Eight images of a group are halved, seven stay together."
    parts = two_parts(np.repeat([0, 1], [8, 7]))
    assert parts[:8].sum() == 4 and len(set(parts[8:].tolist())) == 1

def test_evaluate_one_neighbour_can_be_asked_for():
    x = torch.eye(3)
    rows, cosines = nearest_neighbours(x, x, 1)
    assert rows.tolist() == [[0], [1], [2]] and cosines.tolist() == [[1.], [1.], [1.]]
    with pytest.raises(ValueError, match='k=0'): nearest_neighbours(x, x, 0)

# -- the splits of the registered studies ---------------------------------------------------------

PILOT = set('''n01784675 n02085620 n02129165 n02480495 n02788148 n02793495 n02815834 n02843684
    n03026506 n03201208 n03388043 n03424325 n03804744 n03837869 n03902125 n03937543
    n04251144 n04371430 n07875152 n09193705'''.split())

@pytest.mark.parametrize('name,test', [('tiny80', 10_400), ('cifar10', 10_000)])
def test_studies_splits_are_apart(name, test):
    "No image that judges, or that chooses, is ever trained on; every seed has training images of its own."
    split = read_split(f'data/splits/{name}.json')
    def flat(part): return [o for some in split.parts[part].values() for o in some]
    pool, val, judges = map(flat, ('pool', 'val', 'test'))
    assert len(judges) == len(set(judges)) == test
    assert not set(pool) & set(val) and not set(pool) & set(judges) and not set(val) & set(judges)
    shares = [{o for some in split_names(split, 'train', k).values() for o in some} for k in range(split.seeds)]
    assert all(o <= set(pool) and len(o) == split.per_class*len(split.parts['pool']) for o in shares)
    assert len({tuple(sorted(o)) for o in shares}) == split.seeds
    assert list(split.parts['pool']) == list(split.parts['val']) == list(split.parts['test']) # the same labels

def test_studies_copies_of_a_split_are_test_images_and_whitened_elsewhere(tmp_path, monkeypatch):
    "The road of the study of the claims: copies of test images, a whitening from images that nothing else sees."
    import multigrain.datasets as datasets
    from PIL import Image
    parts = 'pool', 'val', 'test', 'whiten'
    names = {o: {c: [f'{o}{c}{i}.png' for i in range(2)] for c in ('a', 'b')} for o in parts}
    for part in names.values():
        for c, files in part.items():
            (tmp_path/'images'/c).mkdir(parents=True, exist_ok=True)
            for i, o in enumerate(files): Image.new('RGB', (8 + i, 8)).save(tmp_path/'images'/c/o)
    parts = names | dict(copies={c: files[:1] for c, files in names['test'].items()})
    split = dict(about='', source=str(tmp_path/'images'), per_class=1, seeds=2, parts=parts)
    (tmp_path/'split.json').write_text(json.dumps(split))
    monkeypatch.setattr(datasets, 'project_root', lambda: tmp_path)
    study, data = dataclasses.replace(STUDIES['claims'], data='x'), f'split:{tmp_path/"split.json"}#1'
    found = open_set(study, 'copies', data)
    assert {Path(o).name for o in found.images.paths} == {'testa0.png', 'testb0.png'}
    assert {Path(o).name for o in found.whiten.paths} == {f'whiten{c}{i}.png' for c in 'ab' for i in range(2)}
    tested = open_set(study, 'test', data).images.paths
    assert {Path(o).name for o in tested} == {f'test{c}{i}.png' for c in 'ab' for i in range(2)}

def test_studies_split_leaves_the_pilots_alone():
    split = read_split('data/splits/tiny80.json')
    assert set(split.parts['whiten']) == PILOT and not PILOT & set(split.parts['pool'])
    for c, some in split.parts['copies'].items(): assert set(some) <= set(split.parts['test'][c])
    assert 10*96 <= sum(map(len, split.parts['whiten'].values())) # ten images for each dimension
    pilot = read_split('data/splits/pilot20.json')
    assert set(pilot.parts['pool']) == PILOT and pilot.per_class*20 == split.per_class*80
    for c, some in pilot.parts['pool'].items(): assert not set(some) & set(pilot.parts['val'][c])

def test_claims_are_registered_with_their_arms():
    "Arms and seeds of a study are those that were registered, and all rules can be read."
    for name, o in registered()['studies'].items():
        study = find_study(name)
        assert study.seeds == o['seeds'] and asks(study, 'claims').arms == o['arms'] and rule_arms(rules(name))
        assert set(rule_arms(rules(name))) <= set(o['arms'])

def made_up_record(root, study, arm, seed, sets):
    "A record without a training: what the report of a study reads."
    from multigrain.studies import pack_bits, run_name
    r, rng = arm_recipe(study, arm, seed), np.random.default_rng([seed, sorted(ARMS).index(arm)])
    top1 = 20 + sorted(ARMS).index(arm)/2 + rng.normal(0, .3)
    count = dict(images=640, classes=80)
    curve = [dict(epoch=e, train_top1=.8, val_top1=top1/100*min(1, (e + 1)/10)) for e in range(r.epochs)]
    def rows(name, s, p):
        if name in ('val', 'test'): return [[f'{name} top-1', s, p, 0, top1 + s/100]]
        if name == 'in_aug': return [[name, s, p, 0, 3 + .1*p]]
        return [[name, s, p, 0, 2*top1], [name, s, p, 96, 2*top1 + 3 + rng.normal(0, .1)]]
    scores = {f'{o} {s}': [row for p in PS for row in rows(o, s, p)] for o in sets for s in study.s}
    right = {f'{s} {p:g}': pack_bits(rng.random(500) < top1/100) for s in study.s for p in PS}
    files = {'run.json': dict(parameters=parameters(r), complete=True, data=dict(train=count, val=count)),
             'scores.json': scores, 'right.json': right}
    folder = root/run_name(study, arm, seed)
    folder.mkdir()
    for name, o in files.items(): (folder/name).write_text(json.dumps(o))
    (folder/'metrics.jsonl').write_text(''.join(json.dumps(o) + '\n' for o in curve))

@pytest.mark.parametrize('name', ['claims', 'pilots'])
def test_claims_report_is_made_when_all_runs_are_there(name, tmp_path, monkeypatch):
    "The whole notebook on made-up records: it judges every rule, draws, and leaves its result for the page."
    import papermill
    from multigrain.studies import flat_sets
    (runs := tmp_path/'runs').mkdir()
    for o in {name, 'pilots'}: # whose runs are a condition of the others
        study = find_study(o)
        wanted = asks(study, 'claims')
        for arm in wanted.arms:
            for seed in range(study.seeds): made_up_record(runs, study, arm, seed, flat_sets(study, wanted.sets))
    monkeypatch.setenv('MULTIGRAIN_RUNS', str(runs))
    papermill.execute_notebook(str(ROOT/'nbs/studies/claims.ipynb'), str(tmp_path/'out.ipynb'), progress_bar=False,
                               parameters=dict(preset=name, out=str(tmp_path/'result')), cwd=str(ROOT))
    found = json.loads((tmp_path/'result/claims.json').read_text())
    assert [o['claim'] for o in found['claims']] == [o.claim for o in rules(name)]
    assert (tmp_path/'result'/found['picture']).stat().st_size > 10_000
    assert all(f'{name}-' in o for o in found['note'].split(': ')[-1].rstrip('.').split())
