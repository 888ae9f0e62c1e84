"""What other libraries make of the same weights: their modules, filled with those of ours."""

from __future__ import annotations

import warnings

import torch
from torch import nn

with warnings.catch_warnings():  # of what they import, which is not ours to mend
    warnings.simplefilter("ignore")
    from slot_attention import SlotAttention
    from torch_geometric.nn.aggr import DeepSetsAggregation as DeepSetsAggregation
    from torch_geometric.nn.aggr import SetTransformerAggregation
    from torch_geometric.nn.aggr import utils as pyg


def copied(theirs, ours):
    """A module or parameter of theirs, with what one of ours holds."""
    with torch.no_grad():
        if isinstance(theirs, nn.Parameter):
            theirs.copy_(ours.expand_as(theirs))
        else:
            theirs.load_state_dict(ours.state_dict())


def multihead(ours, dim_in, to_query=None):
    """torch's attention of queries (B, m, dim) to elements (B, n, dim_in), projected by ours.

    Args:
        ours: a module with to_key and to_value, num_heads and perhaps to_out.
        dim_in: width of the elements.
        to_query: projects the queries; None where they are what they are.
    """
    dim = ours.to_key.out_features
    theirs = nn.MultiheadAttention(
        dim, ours.num_heads, kdim=dim_in, vdim=dim_in, batch_first=True, dtype=torch.float64
    )
    identity = torch.eye(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
    layers = to_query, ours.to_key, ours.to_value, getattr(ours, "to_out", None)
    weights, biases = zip(
        *((identity if layer is None else (layer.weight, layer.bias)) for layer in layers),
        strict=True,
    )
    if theirs.in_proj_weight is None:
        homes = theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight
        for home, weight in zip(homes, weights[:3], strict=True):
            copied(home, weight)
    else:
        copied(theirs.in_proj_weight, torch.cat(weights[:3]))
    copied(theirs.in_proj_bias, torch.cat(biases[:3]))
    copied(theirs.out_proj.weight, weights[3])
    copied(theirs.out_proj.bias, biases[3])
    return theirs.eval()


def mab(ours):
    """PyG's MultiheadAttentionBlock."""
    theirs = pyg.MultiheadAttentionBlock(ours.dim, ours.num_heads, ours.layer_norm).double()
    theirs.attn = multihead(ours, ours.dim, ours.to_query)
    copied(theirs.lin, ours.feed)
    if ours.layer_norm:
        copied(theirs.layer_norm1, ours.norm)
        copied(theirs.layer_norm2, ours.last_norm)
    return theirs.eval()


def sab(ours):
    """PyG's SetAttentionBlock."""
    theirs = pyg.SetAttentionBlock(ours.dim, ours.num_heads, ours.layer_norm)
    theirs.mab = mab(ours.block)
    return theirs.eval()


def isab(ours):
    """PyG's InducedSetAttentionBlock."""
    theirs = pyg.InducedSetAttentionBlock(
        ours.dim, ours.num_inducing, ours.num_heads, ours.layer_norm
    ).double()
    copied(theirs.ind, ours.pool.seeds)
    theirs.mab1, theirs.mab2 = mab(ours.pool.block), mab(ours.look)
    return theirs.eval()


def pma(ours):
    """PyG's PoolingByMultiheadAttention."""
    theirs = pyg.PoolingByMultiheadAttention(
        ours.dim, ours.num_seeds, ours.num_heads, ours.layer_norm
    ).double()
    copied(theirs.lin, ours.features[0])
    copied(theirs.seed, ours.encoder.seeds)
    theirs.mab = mab(ours.encoder.block)
    return theirs.eval()


def set_transformer(ours):
    """PyG's SetTransformerAggregation, which begins after the linear layer that ours begins with."""
    decoder = ours.pool.head if ours.num_decoder_layers else ()
    theirs = SetTransformerAggregation(ours.dim, num_encoder_blocks=0, num_decoder_blocks=0)
    theirs.encoders = nn.ModuleList(map(sab, ours.layers))
    theirs.pma = pma(ours.pool.encoder if ours.num_decoder_layers else ours.pool)
    theirs.decoders = nn.ModuleList(map(sab, decoder))
    return theirs.eval()


def slot_attention(ours):
    """The package slot-attention's SlotAttention."""
    theirs = SlotAttention(
        ours.num_slots, ours.dim, ours.num_iterations, hidden_dim=ours.dim_hidden
    ).double()
    copied(theirs.slots_mu, ours.attention.slot_mean)
    copied(theirs.slots_logsigma, ours.attention.slot_deviation.log())
    pairs = (
        (theirs.to_q, ours.attention.to_query),
        (theirs.to_k, ours.attention.to_key),
        (theirs.to_v, ours.attention.to_value),
        (theirs.gru, ours.gru),
        (theirs.mlp, ours.mlp),
        (theirs.norm_input, ours.norm_input),
        (theirs.norm_slots, ours.attention.norm),
        (theirs.norm_pre_ff, ours.norm_hidden),
    )
    for home, module in pairs:
        copied(home, module)
    return theirs.eval()
