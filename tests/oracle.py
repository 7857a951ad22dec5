"""An fp64 reference for every equation, written as loops over i and j straight from the paper: no shift, no batching
tricks, nothing shared with the package. It is slow on purpose; the tests compare small cases with it.
"""

import math

import torch


def sinusoid(distance: float, width: int) -> torch.Tensor:
    """R_distance: (width,) fp64, sines then cosines."""
    angles = [distance / 10000 ** (2 * f / width) for f in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def relative_attention(
    query,
    key,
    value,
    rel_key_of,
    content_bias=None,
    position_bias=None,
    rel_bias_of=None,
    key_mask=None,
    window=None,
    future=0,
    document_of=None,
):
    """Section 3.3 for every pair (i, j).

    query (B, H, L, Dh), key and value (B, H, K, Dh), fp64; rel_key_of(head, distance) → (Dh,) is W_R R_distance;
    rel_bias_of(head, distance) a learned score; document_of(b, j) the number of a key's document. Returns
    (B, H, L, Dh) and probabilities (B, H, L, K).
    """
    B, H, L, Dh = query.shape
    K = key.shape[2]
    u = torch.zeros(H, Dh, dtype=torch.float64) if content_bias is None else content_bias
    v = torch.zeros(H, Dh, dtype=torch.float64) if position_bias is None else position_bias
    output = torch.zeros_like(query)
    probabilities = query.new_zeros(B, H, L, K)
    for b in range(B):
        for h in range(H):
            for i in range(L):
                q = query[b, h, i]
                scores = []
                for j in range(K):
                    distance = (K - L + i) - j
                    hidden = distance < -future or (window is not None and distance > window)
                    hidden = hidden or (document_of and document_of(b, j) != document_of(b, K - L + i))
                    hidden = hidden or (key_mask is not None and not key_mask[b, j] and distance != 0)
                    if hidden:
                        scores.append(torch.tensor(-math.inf, dtype=torch.float64))
                        continue
                    score = q @ key[b, h, j] + u[h] @ key[b, h, j]
                    if rel_key_of is not None:
                        score = score + q @ rel_key_of(h, distance) + v[h] @ rel_key_of(h, distance)
                    if rel_bias_of is not None:
                        score = score + rel_bias_of(h, distance)
                    scores.append(score / math.sqrt(Dh))
                weights = torch.softmax(torch.stack(scores), dim=0)
                probabilities[b, h, i] = weights
                output[b, h, i] = sum(weights[j] * value[b, h, j] for j in range(K))
    return output, probabilities


def attention_of(tensors, key_mask=None, window=None, future=0, document_of=None):
    """The same from what a backend is given: tensors by name, rel_key (H, n, Dh) and rel_bias (H, n) with the furthest
    distance first, whose row is also that of any that is further; either may be missing. The last is of -future."""

    def row_of(name):
        rows = tensors.get(name)
        return None if rows is None else lambda h, distance: rows[h, max(0, rows.shape[1] - 1 - future - distance)]

    return relative_attention(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        row_of("rel_key"),
        tensors.get("content_bias"),
        tensors.get("position_bias"),
        row_of("rel_bias"),
        key_mask,
        window,
        future,
        document_of,
    )


class ReferenceModel:
    """A whole Transformer-XL in fp64 from a model's parameters: `ReferenceModel(model)(input_ids, mems)`.

    Without dropout; returns (log-probabilities (B, L, V), new mems), no mems for attn_type 2 and 3.
    """

    def __init__(self, model):
        self.config = model.config
        self.parameters = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}

    def embed(self, token: int) -> torch.Tensor:
        config = self.config
        ends = [0, *config.cutoffs, config.vocab_size]
        i = max(k for k in range(len(ends) - 1) if ends[k] <= token)
        if config.div_val == 1:
            i, row = 0, token
        else:
            row = token - ends[i]
        embedding = self.parameters[f"transformer.embed_tokens.emb_layers.{i}.weight"][row]
        projection = self.parameters.get(f"transformer.embed_tokens.emb_projs.{i}.weight")
        if projection is not None:
            embedding = projection @ embedding
        return embedding * math.sqrt(config.d_model)

    def absolute_position(self, distance: int) -> torch.Tensor:
        """The encoding that attn_type 2 adds to the token `distance` before the segment's last one."""
        clamped = min(distance, self.config.clamp_len) if self.config.clamp_len > 0 else distance
        return sinusoid(clamped, self.config.d_model)

    def log_prob(self, hidden: torch.Tensor) -> torch.Tensor:
        """log P of each token, one token at a time: log P(cluster) + log P(token | cluster)."""
        config = self.config
        ends = [0, *config.cutoffs, config.vocab_size]
        logits = []
        for i in range(len(ends) - 1):
            table, start = (0, ends[i]) if config.div_val == 1 else (i, 0)
            rows = slice(start, start + ends[i + 1] - ends[i])
            projection = self.parameters.get(f"lm_head.out_projs.{i}.weight")
            projected = hidden if projection is None else projection.T @ hidden
            weight = self.parameters[f"lm_head.out_layers.{table}.weight"][rows]
            bin_logits = weight @ projected + self.parameters[f"lm_head.out_layers.{table}.bias"][rows]
            if i == 0 and config.cutoffs:
                clusters = self.parameters["lm_head.clusters.weight"] @ projected
                bin_logits = torch.cat([bin_logits, clusters + self.parameters["lm_head.clusters.bias"]])
            logits.append(bin_logits)
        head = logits[0] - torch.logsumexp(logits[0], 0)
        result = [head[: ends[1]]]
        for i in range(1, len(ends) - 1):
            result.append(head[ends[1] + i - 1] + logits[i] - torch.logsumexp(logits[i], 0))
        return torch.cat(result)

    def norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        mean = states.mean(-1, keepdim=True)
        variance = ((states - mean) ** 2).mean(-1, keepdim=True)
        scaled = (states - mean) / torch.sqrt(variance + self.config.layer_norm_epsilon)
        return scaled * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def join(self, x: torch.Tensor, y: torch.Tensor, gate: str) -> torch.Tensor:
        """Join x and a sub-layer's y: the gate of Parisotto et al. (2020), Section 3.2, or the sum."""
        if self.config.gating is None:
            return x + y
        y, width = y.clamp(min=0), self.config.d_model
        of_y, of_x = (self.parameters[f"{gate}.{name}.weight"] for name in ("y_proj", "x_proj"))
        w_r, w_z, w_g = of_y[:width], of_y[width : 2 * width], of_y[2 * width :]
        u_r, u_z, u_g = of_x[:width], of_x[width:], self.parameters[f"{gate}.candidate_proj.weight"]
        r = 1 / (1 + torch.exp(-(y @ w_r.T + x @ u_r.T)))
        z = 1 / (1 + torch.exp(-(y @ w_z.T + x @ u_z.T - self.parameters[f"{gate}.bias"])))
        h = torch.tanh(y @ w_g.T + (r * x) @ u_g.T)
        return (1 - z) * x + z * h

    def __call__(self, input_ids, mems=None):
        config, parameters = self.config, self.parameters
        B, L = input_ids.shape
        H, Dh = config.n_head, config.d_head
        if mems is None:
            length = config.mem_len if config.initial_memory == "zeros" else 0
            mems = [torch.zeros(B, length, config.d_model, dtype=torch.float64)] * config.n_layer
        window = None
        if config.same_length and config.mem_len > 0:
            window = config.mem_len - 1 if config.same_length_counts_self else config.mem_len
        hidden = torch.stack([torch.stack([self.embed(int(token)) for token in row]) for row in input_ids])
        if config.attn_type == 2:
            hidden = hidden + torch.stack([self.absolute_position(L - 1 - i) for i in range(L)])
        new_mems = []
        for n in range(config.n_layer):
            name = f"transformer.layers.{n}"
            if config.attn_type == 3:
                rows = [parameters["transformer.r_emb"][n, config.max_klen - L + i].reshape(-1) for i in range(L)]
                hidden = hidden + torch.stack(rows)
            memory = mems[n].double()
            end = memory.shape[1] + max(0, L - config.ext_len)
            new_mems.append(torch.cat([memory, hidden], 1)[:, max(0, end - config.mem_len) : end])
            context = torch.cat([memory, hidden], 1)
            queries = hidden
            if config.pre_lnorm:
                context = self.norm(context, f"{name}.self_attn_layer_norm")
                if config.attn_type in (0, 1) or config.gating:
                    queries = context[:, -L:]

            def heads(states, projection, name=name):
                weight = parameters[f"{name}.self_attn.{projection}.weight"]
                return (states @ weight.T).view(B, -1, H, Dh).transpose(1, 2)

            u = v = rel_key_of = rel_bias_of = None
            if config.attn_type == 0:

                def rel_key_of(h, distance, name=name):
                    limits = [limit for limit in (config.clamp_len, config.decay_len) if limit > 0]
                    clamped = min([distance, *limits])
                    projected = parameters[f"{name}.self_attn.r_proj.weight"] @ sinusoid(clamped, config.d_model)
                    return projected.view(H, Dh)[h]

                if config.decay_len > 0:

                    def rel_bias_of(h, distance):
                        return 2 * math.log(min(1, config.decay_len / max(distance, 1))) * Dh**0.5

                owner = f"{name}.self_attn" if config.untie_r else "transformer"
                u, v = parameters[f"{owner}.content_bias"], parameters[f"{owner}.position_bias"]
            elif config.attn_type == 1:
                rows = config.max_klen
                furthest = min(rows, config.clamp_len) if config.clamp_len > 0 else rows

                def rel_key_of(h, distance, n=n, rows=rows, furthest=furthest):
                    return parameters["transformer.r_emb"][n, rows - 1 - min(distance, furthest - 1), h]

                def rel_bias_of(h, distance, n=n, rows=rows, furthest=furthest):
                    return parameters["transformer.r_bias"][n, rows - 1 - min(distance, furthest - 1), h]

                u = parameters["transformer.content_bias"][n]
            attended, _ = relative_attention(
                heads(queries, "q_proj"),
                heads(context, "k_proj"),
                heads(context, "v_proj"),
                rel_key_of,
                u,
                v,
                rel_bias_of,
                window=window,
            )
            attended = attended.transpose(1, 2).reshape(B, L, H * Dh)
            attended = attended @ parameters[f"{name}.self_attn.o_proj.weight"].T
            hidden = self.join(hidden, attended, f"{name}.self_attn_gate")
            if not config.pre_lnorm:
                hidden = self.norm(hidden, f"{name}.self_attn_layer_norm")
            inner = self.norm(hidden, f"{name}.mlp_layer_norm") if config.pre_lnorm else hidden
            inner = inner @ parameters[f"{name}.mlp.up_proj.weight"].T + parameters[f"{name}.mlp.up_proj.bias"]
            inner = inner.clamp(min=0) @ parameters[f"{name}.mlp.down_proj.weight"].T
            inner = inner + parameters[f"{name}.mlp.down_proj.bias"]
            inner = inner.clamp(min=0) if config.mlp_output_relu else inner
            hidden = self.join(hidden, inner, f"{name}.mlp_gate")
            if not config.pre_lnorm:
                hidden = self.norm(hidden, f"{name}.mlp_layer_norm")
        log_probs = torch.stack([torch.stack([self.log_prob(state) for state in row]) for row in hidden])
        return log_probs, new_mems if config.attn_type in (0, 1) else None
