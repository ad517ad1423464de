"""Attention to given keys, and its gradients, in NumPy: an oracle that compiles nothing."""

import numpy as np


def with_gradients(
    query, key, value, seen, scale, d_out, d_lse, weight=None, previous=None, *, dtype
) -> dict[str, np.ndarray]:
    """Results and gradients by name, computed in `dtype`; `products` are those of `out` and `d_out`.

    Args:
      query: `[B, T, N, H]`.
      key, value: `[B, S, K, H]` and `[B, S, K, V]`.
      seen: `[B, T, K, S]`, or 1 for K: whether the query attends to the key.
      scale: factor of the logits.
      d_out, d_lse: cotangents of `weight * out` and of the log-sum-exps; of queries that see nothing the
        latter does not count.
      weight: factor of `out`, `[B, T, N]`; None is 1.
      previous: what is added to the gradient of the queries.
    """
    query, key, value, d_out, d_lse, weight, previous = (
        None if x is None else np.asarray(x, dtype)
        for x in (query, key, value, d_out, d_lse, weight, previous)
    )
    grouped = (*query.shape[:2], key.shape[2], query.shape[2] // key.shape[2])

    def by_kv_head(x):
        return x.reshape(*grouped, *x.shape[3:])

    def product(form, *arrays):
        return np.einsum(form, *arrays, optimize=True)

    q, seen = by_kv_head(query), np.asarray(seen)[:, :, :, None]
    some = np.broadcast_to(seen.any(-1), grouped)
    logits = product("btkgh,bskh->btkgs", q, key) * scale
    top = np.where(some, np.max(logits, axis=-1, where=seen, initial=-np.inf), 0)
    p = np.where(seen, np.exp(np.where(seen, logits - top[..., None], 0)), 0)
    total = np.where(some, p.sum(-1), 1)
    p = p / total[..., None]
    out = product("btkgs,bskv->btkgv", p, value)
    lse = np.where(some, np.log(total) + top, -np.inf)

    of_branch = by_kv_head(d_out if weight is None else d_out * weight[..., None])
    delta = (out * of_branch).sum(-1) - np.where(some, by_kv_head(d_lse), 0)
    d_logits = p * (product("btkgv,bskv->btkgs", of_branch, value) - delta[..., None]) * scale
    d_query = product("btkgs,bskh->btkgh", d_logits, key).reshape(query.shape)
    out = out.reshape(*query.shape[:3], -1)
    return dict(
        out=out,
        lse=lse.reshape(query.shape[:3]),
        products=(out * d_out).sum(-1),
        d_query=d_query if previous is None else d_query + previous,
        d_key=product("btkgs,btkgh->bskh", d_logits, q),
        d_value=product("btkgs,btkgv->bskv", p, of_branch),
    )
