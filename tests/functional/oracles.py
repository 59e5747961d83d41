"""Slow float64 loops, written from the equations one sum at a time; no code is shared with the package."""

import cmath
import math

import torch


def normalised(row):
    norm = math.sqrt(sum(v * v for v in row))
    return [v / norm for v in row] if norm > 1e-12 else [0.0 for _ in row]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def mean_cosine(a, b):
    """The mean over rows, in float64."""
    return sum(dot(x, y) for x, y in zip(units(a.double()), units(b.double()), strict=True)) / len(a)


def squared(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def units(z):
    return [normalised(row) for row in z.tolist()]


def log_softmax(scores):
    top = max(scores)
    total = math.log(sum(math.exp(s - top) for s in scores)) + top
    return [s - total for s in scores]


def nt_xent(z1, z2, temperature, zero_self=False):
    u, n = units(z1) + units(z2), len(z1)
    loss = 0.0
    for a in range(2 * n):
        partner = (a + n) % (2 * n)
        denominator = sum(math.exp(dot(u[a], u[b]) / temperature) for b in range(2 * n) if b != a)
        denominator += 1.0 if zero_self else 0.0
        loss += -dot(u[a], u[partner]) / temperature + math.log(denominator)
    return loss / (2 * n)


def one_sided_nt_xent(z1, z2, temperature):
    u1, u2 = units(z1), units(z2)
    loss = 0.0
    for a, b in zip(u1, u2, strict=True):
        loss -= dot(a, b) / temperature - math.log(sum(math.exp(dot(a, v) / temperature) for v in u1 + u2))
    return loss / len(u1)


def queue_contrast(q, k, queue, temperature):
    loss = 0.0
    for a, b in zip(units(q), units(k), strict=True):
        scores = [dot(a, b) / temperature] + [dot(a, row) / temperature for row in queue.tolist()]
        loss -= log_softmax(scores)[0]
    return loss / len(q)


def dictionary_contrast(z1, z2, dictionary, temperature):
    u1, u2 = units(z1), units(z2)
    loss = 0.0
    for i, a in enumerate(u1):
        loss -= log_softmax([dot(a, v) / temperature for v in u2 + dictionary.tolist()])[i]
    return loss / len(u1)


def model_contrast(z, z_global, z_previous, temperature):
    loss = 0.0
    for a, g, p in zip(units(z), units(z_global), units(z_previous), strict=True):
        near, far = math.exp(dot(a, g) / temperature), math.exp(dot(a, p) / temperature)
        loss -= math.log(near / (near + far))
    return loss / len(z)


def supcon(z, labels, temperature, base_temperature):
    u, y = units(z), labels.tolist()
    loss = 0.0
    for a in range(len(u)):
        others = [b for b in range(len(u)) if b != a]
        positives = [p for p in others if y[p] == y[a]]
        if positives:
            total = math.log(sum(math.exp(dot(u[a], u[b]) / temperature) for b in others))
            loss += sum(dot(u[a], u[p]) / temperature - total for p in positives) / len(positives)
    return -temperature / base_temperature * loss / len(u)


def relational(a, b, references, temperature, target_temperature):
    def probabilities(row, tau):
        return [math.exp(s) for s in log_softmax([dot(row, r) / tau for r in units(references)])]

    loss = 0.0
    for x, y in zip(units(a), units(b), strict=True):
        s_x, s_y = probabilities(x, temperature), probabilities(y, temperature)
        t_x, t_y = probabilities(x, target_temperature), probabilities(y, target_temperature)
        for i in range(len(s_x)):
            m = (t_x[i] + t_y[i]) / 2
            loss += 0.5 * m * (math.log(m / s_x[i]) + math.log(m / s_y[i]))
    return loss / len(a)


def alignment(z1, z2):
    return sum(squared(a, b) for a, b in zip(units(z1), units(z2), strict=True)) / len(z1)


def potentials(z, t):
    """Gaussian potential of every pair i < j, by pair."""
    u = units(z)
    return {(i, j): math.exp(-t * squared(u[i], u[j])) for i in range(len(u)) for j in range(i + 1, len(u))}


def uniformity(z, t):
    values = potentials(z, t).values()
    return math.log(sum(values) / len(values))


def columns(z, unbiased, eps=0.0):
    """Standardised columns."""
    result = []
    for column in z.T.tolist():
        mean = sum(column) / len(column)
        variance = sum((v - mean) ** 2 for v in column) / (len(column) - unbiased)
        result.append([(v - mean) / math.sqrt(variance + eps) for v in column])
    return result


def vicreg(z1, z2, invariance=25.0, variance=25.0, covariance=1.0, official=False):
    """Entry by entry."""
    n, d = z1.shape
    s = sum(squared(a, b) for a, b in zip(z1.tolist(), z2.tolist(), strict=True)) / n
    v = c = 0.0
    for z in (z1, z2):
        columns = z.T.tolist()
        means = [sum(column) / n for column in columns]
        for i in range(d):
            for j in range(d):
                pairs = zip(columns[i], columns[j], strict=True)
                entry = sum((a - means[i]) * (b - means[j]) for a, b in pairs) / (n - 1)
                if i == j:
                    v += max(0.0, 1 - math.sqrt(entry + 1e-4)) / d
                else:
                    c += entry**2 / d
    if official:
        s, v = s / d, v / 2
    return invariance * s + variance * v + covariance * c


def dino(student, teacher, centre, student_temperature, teacher_temperature):
    """View by view, image by image."""
    total, pairs = 0.0, 0
    for u, targets in enumerate(teacher.tolist()):
        for v, outputs in enumerate(student.tolist()):
            if u == v:
                continue
            pairs += 1
            for t, s in zip(targets, outputs, strict=True):
                sharp = [
                    math.exp((a - c) / teacher_temperature) for a, c in zip(t, centre.tolist(), strict=True)
                ]
                soft = [math.exp(a / student_temperature) for a in s]
                total -= sum(
                    p / sum(sharp) * math.log(q / sum(soft)) for p, q in zip(sharp, soft, strict=True)
                ) / len(targets)
    return total / pairs


def swav_codes(scores, epsilon, iterations):
    """Entry by entry: each prototype gets N/K, then each sample 1."""
    n, k = len(scores), len(scores[0])
    q = [[math.exp(s / epsilon) for s in row] for row in scores.tolist()]
    for _ in range(iterations):
        mass = [sum(q[i][j] for i in range(n)) for j in range(k)]
        q = [[q[i][j] * n / (k * mass[j]) for j in range(k)] for i in range(n)]
        q = [[one / sum(row) for one in row] for row in q]
    return torch.tensor(q, dtype=torch.float64)


def swav(scores, codes, temperature):
    """View by view, image by image."""
    losses = []
    for u, given in enumerate(codes.tolist()):
        for v, seen in enumerate(scores.tolist()):
            if u == v:
                continue
            total = 0.0
            for q, s in zip(given, seen, strict=True):
                soft = [math.exp(one / temperature) for one in s]
                total -= sum(a * math.log(b / sum(soft)) for a, b in zip(q, soft, strict=True))
            losses.append(total / len(given))
    return sum(losses) / len(losses)


def barlow_twins(z1, z2, lambd, unbiased):
    loss = 0.0
    for i, a in enumerate(columns(z1, unbiased)):
        for j, b in enumerate(columns(z2, unbiased)):
            c = dot(a, b) / len(z1)
            loss += (1 - c) ** 2 if i == j else lambd * c**2
    return loss


def decorrelation(h):
    x = columns(h, True, 1e-8)
    d = len(x)
    entries = [dot(x[i], x[j]) ** 2 for i in range(d) for j in range(d) if i != j]
    return sum(entries) / len(entries) / len(h)


def dimension_scaling(z, scales, basis, reduction, renormalise=True):
    q, d = basis.tolist(), len(scales)
    total = 0.0
    for u in units(z) if renormalise else z.tolist():
        inner = [sum(q[i][m] * u[i] for i in range(d)) * float(scales[m]) for m in range(d)]
        target = [sum(q[i][m] * inner[m] for m in range(d)) for i in range(d)]
        total += squared(u, normalised(target) if renormalise else target)
    return total / len(z) if reduction == "mean_sq" else math.sqrt(total) / len(z)


def projector_distillation(h, z, direction, temperature):
    loss = 0.0
    for a, b in zip(h.tolist(), z.tolist(), strict=True):
        log_h, log_z = log_softmax([v / temperature for v in a]), log_softmax([v / temperature for v in b])
        p, q = (log_z, log_h) if direction == "zh" else (log_h, log_z)
        loss += sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True))
    return loss / len(h)


def squared_error(h, z):
    entries = [
        (x - y) ** 2 for a, b in zip(h.tolist(), z.tolist(), strict=True) for x, y in zip(a, b, strict=True)
    ]
    return sum(entries) / len(entries)


def singular_values(h):
    """Columns turned in pairs until all are orthogonal (Hestenes); their lengths are the singular values."""
    a = h.T.tolist()
    for _ in range(30):
        for p in range(len(a)):
            for q in range(p):
                product = dot(a[p], a[q])
                if product == 0.0:
                    continue
                zeta = (dot(a[q], a[q]) - dot(a[p], a[p])) / (2 * product)
                t = math.copysign(1.0, zeta) / (abs(zeta) + math.hypot(1.0, zeta))
                c, s = 1 / math.sqrt(1 + t**2), t / math.sqrt(1 + t**2)
                pairs = list(zip(a[p], a[q], strict=True))
                a[p], a[q] = [c * x - s * y for x, y in pairs], [s * x + c * y for x, y in pairs]
    return [math.sqrt(dot(column, column)) for column in a]


def effective_rank(h):
    sigma = singular_values(h)
    p = [s / sum(sigma) for s in sigma if s > 1e-12 * max(sigma)]
    return math.exp(-sum(x * math.log(x) for x in p))


def representability(w):
    """Squared entries of an orthonormal basis of the rows (Gram-Schmidt, each row twice)."""
    basis = []
    for row in w.tolist():
        rest = row
        for v in basis * 2:
            along = dot(rest, v)
            rest = [x - along * y for x, y in zip(rest, v, strict=True)]
        if dot(rest, rest) > 1e-20 * dot(row, row):
            basis.append(normalised(rest))
    return [sum(v[i] ** 2 for v in basis) for i in range(w.shape[1])]


def shortest_on_a_grid(u, steps):
    """The least ‖Σ α_k u_k‖ of three vectors over all α on the simplex that are multiples of 1/steps."""
    a, b, c = u.tolist()
    least = math.inf
    for i in range(steps + 1):
        for j in range(steps + 1 - i):
            v = [(i * x + j * y + (steps - i - j) * z) / steps for x, y, z in zip(a, b, c, strict=True)]
            least = min(least, dot(v, v))
    return math.sqrt(least)


def hinges(a, p, pairs, margins, power):
    """Mean over rows of Σ_m [d(a, p)^k − d(pair_m)^k + margin_m]₊."""
    loss = 0.0
    for i in range(len(a)):
        positive = squared(a[i].tolist(), p[i].tolist()) ** (power / 2)
        for (x, y), margin in zip(pairs, margins, strict=True):
            loss += max(0.0, positive - squared(x[i].tolist(), y[i].tolist()) ** (power / 2) + margin)
    return loss / len(a)


def tangent_transport(u, samples, tangents, directions):
    """FedU²'s released regulariser with explicit logarithms, one tangent point at a time."""

    def log_map(c, x):
        theta = math.acos(max(-1.0, min(1.0, dot(c, x))))
        return [theta / math.sin(theta) * (a - math.cos(theta) * b) for a, b in zip(x, c, strict=True)]

    total = 0.0
    for m, c in enumerate(tangents.tolist()):
        for p in directions[m].tolist():
            ours = sorted(dot(log_map(c, x), p) for x in u.tolist())
            theirs = sorted(dot(log_map(c, x), p) for x in samples.tolist())
            total += squared(ours, theirs) / len(ours) / len(directions[m])
    return total / 6


def sigreg(z, directions, limit, points):
    """The trapezoid rule over [−limit, limit], with complex exponentials."""
    total = 0.0
    step = limit / (points - 1)
    for a in directions.tolist():
        for k in range(1 - points, points):
            t = k * step
            phi = sum(cmath.exp(1j * t * dot(a, row)) for row in z.tolist()) / len(z)
            end = 0.5 if abs(k) == points - 1 else 1.0
            gauss = math.exp(-t * t / 2)
            total += len(z) * end * step * abs(phi - gauss) ** 2 * gauss
    return total / len(directions)


def clipped(z, mu):
    return [[v * min(1.0, math.sqrt(mu / max(dot(row, row), 1e-300))) for v in row] for row in z.tolist()]


def spectral_contrast(z1, z2, mu, others, share):
    """The negatives as sums over pairs: tr(R²) = mean (u·v)², and tr(R C̄) = mean uᵀ C̄ u."""
    a, b = clipped(z1, mu), clipped(z2, mu)
    both = a + b
    agreement = sum(dot(u, v) for u, v in zip(a, b, strict=True)) / len(a)
    own = sum(dot(u, v) ** 2 for u in both for v in both) / len(both) ** 2
    across = sum(dot(u, [dot(row, u) for row in others.tolist()]) for u in both) / len(both)
    return share * own + 2 * (1 - share) * across - 2 * agreement


def mean_distance(z):
    z = z.tolist()
    pairs = [(a, b) for i, a in enumerate(z) for j, b in enumerate(z) if i != j]
    return sum(math.sqrt(squared(a, b)) for a, b in pairs) / len(pairs)


def mmd(x, y, sigma):
    def kernel(a, b):
        return math.exp(-squared(a, b) / (2 * sigma**2))

    def within(sample):
        pairs = [(a, b) for i, a in enumerate(sample) for j, b in enumerate(sample) if i != j]
        return sum(kernel(a, b) for a, b in pairs) / len(pairs)

    x, y = x.tolist(), y.tolist()
    return within(x) + within(y) - 2 * sum(kernel(a, b) for a in x for b in y) / (len(x) * len(y))


def _prototypes(x, labels):
    """Means of the rows of each cluster that has rows, by cluster."""
    found = {}
    for c in sorted(set(labels)):
        members = [row for row, label in zip(x.tolist(), labels, strict=True) if label == c]
        found[c] = [sum(column) / len(members) for column in zip(*members, strict=True)]
    return found


def prototype_contrast(z1, z2, labels1, labels2, clusters, temperature):
    first, second = _prototypes(z1, labels1), _prototypes(z2, labels2)
    common = [c for c in range(clusters) if c in first and c in second]
    if not common:
        return 0.0
    return nt_xent(
        *(torch.tensor([side[c] for c in common], dtype=torch.float64) for side in (first, second)),
        temperature,
    )


def prototype_classification(h1, h2, labels1, labels2, clusters):
    prototypes = {c: normalised(row) for c, row in _prototypes(h1, labels1).items()}
    losses = []
    for row, label in zip(units(h2), labels2, strict=True):
        if label in prototypes:
            scores = {c: -squared(row, prototype) for c, prototype in prototypes.items()}
            losses.append(-log_softmax(list(scores.values()))[list(scores).index(label)])
    return sum(losses) / len(losses) if losses else 0.0


def prototype_divergence(h, labels, normalise):
    prototypes = {c: normalised(row) for c, row in _prototypes(h, labels).items()}
    sets = {c: [] for c in prototypes}
    for row, label in zip(units(h) if normalise else h.tolist(), labels, strict=True):
        sets[label].append(math.sqrt(squared(row, prototypes[label])))
    return sum(sum(distances) / len(distances) for distances in sets.values()) / len(sets)


def rows(n, d, seed=0, **options):
    """Gaussian rows in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64, **options)
