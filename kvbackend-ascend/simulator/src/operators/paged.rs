//! The fused operators on paged caches: attention with one row per sequence, and writes of keys and values.

use std::collections::HashSet;
use std::ffi::{CStr, c_char};
use std::sync::Arc;

use super::{TensorArgument, check_apart, check_types, operator, place};
use crate::clock::TaskMoment;
use crate::executor::{First, wrong};
use crate::state::{CallResult, SimState};
use crate::task::Action;
use crate::tensor::{View, load, size_of_type, store};
use crate::types as sys;

type ListArgument = *const sys::aclTensorList;
type NumbersArgument = *const sys::aclIntArray;

/// Copies a string argument.
unsafe fn text(at: *const c_char) -> String {
    if at.is_null() { String::new() } else { CStr::from_ptr(at).to_string_lossy().into_owned() }
}

/// Reads a view's 32-bit integers.
fn numbers(state: &mut SimState, view: &View, moment: &TaskMoment) -> Result<Vec<i32>, String> {
    let at = place(state, view, moment, false)?.cast::<i32>();
    // SAFETY: the view is alive and has these elements.
    Ok((0..view.len()).map(|i| unsafe { at.add(i).read_unaligned() }).collect())
}

/// The blocks of K or V, with either heads or tokens as the outer axis.
struct Pages {
    view: View,
    heads: usize,
    block_size: usize,
    dim: usize,
    heads_outside: bool,
}

impl Pages {
    fn new(view: View, heads: usize, block_size: usize, dim: usize) -> CallResult<Self> {
        let heads_outside = match *view.dims {
            [_, tokens, width] if (tokens, width) == (block_size, heads * dim) && width <= 65_535 => false,
            [_, n, tokens, d] if (n, tokens, d) == (heads, block_size, dim) => true,
            _ => {
                return wrong(format!(
                    "a cache of {:?} for {heads} heads of {dim} in blocks of {block_size}",
                    view.dims
                ));
            }
        };
        if !view.is_dense() || i32::try_from(view.len()).is_err() {
            return wrong("a cache with gaps, or of more than 2^31 elements");
        }
        Ok(Self { view, heads, block_size, dim, heads_outside })
    }

    /// Reads the first tokens of a block as `[heads, tokens, dim]`.
    fn read(
        &self,
        state: &mut SimState,
        moment: &TaskMoment,
        block: i32,
        tokens: usize,
    ) -> Result<Vec<f32>, String> {
        let blocks = self.view.dims[0];
        let Some(block) = usize::try_from(block).ok().filter(|&block| block < blocks) else {
            return Err(format!("block {block} of {blocks}"));
        };
        let Self { heads, block_size, dim, .. } = *self;
        let bytes = size_of_type(self.view.dtype);
        let first = block * heads * block_size * dim;
        let mut values = Vec::with_capacity(heads * tokens * dim);
        for head in 0..heads {
            for token in 0..tokens {
                let row = if self.heads_outside { head * block_size + token } else { token * heads + head };
                let start = self.view.at + ((first + row * dim) * bytes) as u64;
                let at = state.touch(&(start..start + (dim * bytes) as u64), moment, false)?;
                // SAFETY: the row is alive.
                values.extend((0..dim).map(|i| unsafe { load(self.view.dtype, at, i) }));
            }
        }
        Ok(values)
    }
}

/// The attention arguments that this simulator supports. All others must be null, or a value without effect.
struct AttentionArguments {
    q: TensorArgument,
    k: ListArgument,
    v: ListArgument,
    lengths: NumbersArgument,
    table: TensorArgument,
    heads: i64,
    scale: f64,
    layout: *const c_char,
    kv_heads: i64,
    block_size: i64,
    with_lse: bool,
    out: TensorArgument,
    lse: TensorArgument,
}

/// The operands of attention.
struct Attention {
    q: View,
    k: Pages,
    v: Pages,
    table: View,
    lengths: Vec<usize>,
    scale: f32,
    out: View,
    lse: Option<View>,
}

fn attention(first: &mut First<'_>, args: &AttentionArguments) -> CallResult<Action> {
    // SAFETY: the caller passes a string that ends with a zero byte.
    let layout = unsafe { text(args.layout) };
    let q = first.tensor(args.q)?;
    let [rows, heads, 1, dim] = *q.dims else {
        return wrong(format!("queries {:?} of decoding rows", q.dims));
    };
    let (kv_heads, block_size) = (args.kv_heads as usize, args.block_size as usize);
    let named =
        layout == "BNSD" && args.heads as usize == heads && kv_heads > 0 && heads.is_multiple_of(kv_heads);
    if !named || rows > 65_536 || heads > 256 || dim > 512 || heads / kv_heads > 64 {
        return wrong(format!(
            "layout {layout}, {rows} rows, {heads} heads for {kv_heads}, of {dim} elements"
        ));
    }
    if !block_size.is_multiple_of(16) || !(16..=512).contains(&block_size) {
        return wrong(format!("blocks of {block_size} tokens of 16 bits"));
    }
    let k = Pages::new(first.only(args.k)?, kv_heads, block_size, dim)?;
    let v = Pages::new(first.only(args.v)?, kv_heads, block_size, dim)?;
    let (table, out) = (first.tensor(args.table)?, first.output(args.out)?);
    check_types(&[&q, &k.view, &v.view, &out])?;
    if q.dtype == sys::ACL_FLOAT || k.view.dims != v.view.dims {
        return wrong("queries of 32 bits, or keys of other extents than values");
    }
    let lengths: Vec<usize> = first.array(args.lengths)?.iter().map(|&n| n.max(0) as usize).collect();
    let blocks = |tokens: &usize| tokens.div_ceil(block_size);
    let [batch, width] = *table.dims else { return wrong("a block table that is no matrix") };
    let fits = table.dtype == sys::ACL_INT32
        && (batch, lengths.len()) == (rows, rows)
        && lengths.iter().all(|tokens| *tokens <= 262_144 && blocks(tokens) <= width)
        && lengths.iter().map(blocks).sum::<usize>() <= k.view.dims[0];
    if !fits || out.dims != q.dims || ![&q, &table, &out].iter().all(|view| view.is_dense()) {
        return wrong(format!(
            "a table of {batch} by {width} blocks for {lengths:?} tokens in blocks of {block_size}"
        ));
    }
    check_apart(&out, &[&k.view, &v.view, &table])?;
    if out.bytes() == q.bytes() {
        return wrong("a result in the place of the queries");
    }
    check_apart(&out, &[&q])?;
    let lse = if args.with_lse {
        let lse = first.output(args.lse)?;
        if lse.dtype != sys::ACL_FLOAT || lse.dims != [rows, heads, 1, 1] || !lse.is_dense() {
            return wrong(format!("log-sum-exps of {:?}", lse.dims));
        }
        Some(lse)
    } else {
        None
    };
    let attention = Attention { q, k, v, table, lengths, scale: args.scale as f32, out, lse };
    Ok(Arc::new(move |state, moment| attention.run(state, moment)))
}

impl Attention {
    fn run(&self, state: &mut SimState, moment: &TaskMoment) -> Result<(), String> {
        let table = numbers(state, &self.table, moment)?;
        let (width, heads, dim) = (self.table.dims[1], self.q.dims[1], self.q.dims[3]);
        let q = place(state, &self.q, moment, false)?;
        let out = place(state, &self.out, moment, true)?;
        let lse = self.lse.as_ref().map(|lse| place(state, lse, moment, true)).transpose()?;
        for (row, &tokens) in self.lengths.iter().enumerate() {
            let mut pages = Vec::new();
            for (at, block) in
                table[row * width..].iter().take(tokens.div_ceil(self.k.block_size)).enumerate()
            {
                let count = (tokens - at * self.k.block_size).min(self.k.block_size);
                let k = self.k.read(state, moment, *block, count)?;
                pages.push((count, k, self.v.read(state, moment, *block, count)?));
            }
            for head in 0..heads {
                let at = (row * heads + head) * dim;
                // SAFETY: the head's row is inside the view, which is alive.
                let query: Vec<f32> = (0..dim).map(|i| unsafe { load(self.q.dtype, q, at + i) }).collect();
                let (values, sum) = self.of_head(&query, &pages, head * self.k.heads / heads);
                for (i, &x) in values.iter().enumerate() {
                    // SAFETY: the head's row is inside the view, which is alive.
                    unsafe { store(self.out.dtype, out, at + i, x) };
                }
                if let Some(lse) = lse {
                    // SAFETY: the view has an element for each row and head.
                    unsafe { store(sys::ACL_FLOAT, lse, row * heads + head, sum) };
                }
            }
        }
        Ok(())
    }

    /// Returns a head's result and its log-sum-exp. As on the device's matrix unit, the weights are rounded
    /// to the values' type.
    fn of_head(&self, query: &[f32], pages: &[(usize, Vec<f32>, Vec<f32>)], head: usize) -> (Vec<f32>, f32) {
        let dim = query.len();
        let rows =
            |page: &'_ [f32], count: usize| page[head * count * dim..(head + 1) * count * dim].to_vec();
        let mut logits = Vec::new();
        for (count, k, _) in pages {
            let product = |key: &[f32]| key.iter().zip(query).map(|(a, b)| a * b).sum::<f32>();
            logits.extend(rows(k, *count).chunks_exact(dim).map(|key| self.scale * product(key)));
        }
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = logits.iter().map(|x| (x - most).exp()).sum();
        let mut values = vec![0.0; dim];
        let mut logits = logits.into_iter();
        for (count, _, v) in pages {
            for (value, logit) in rows(v, *count).chunks_exact(dim).zip(logits.by_ref()) {
                let mut weight = [0u8; 4];
                // SAFETY: the pointer has room for an element of any type that operators compute with.
                let weight = unsafe {
                    store(self.out.dtype, weight.as_mut_ptr(), 0, (logit - most).exp());
                    load(self.out.dtype, weight.as_ptr(), 0)
                };
                values.iter_mut().zip(value).for_each(|(to, x)| *to += weight * x);
            }
        }
        for x in &mut values {
            *x /= sum;
        }
        (values, most + sum.ln())
    }
}

/// Checks a write of rows to slots of both caches, and returns its action.
fn scatter(
    first: &mut First<'_>,
    rows: [TensorArgument; 2],
    caches: [TensorArgument; 2],
    slots: TensorArgument,
    modes: [*const c_char; 2],
) -> CallResult<Action> {
    // SAFETY: the caller passes strings that end with a zero byte.
    let modes = unsafe { modes.map(|mode| text(mode)) };
    if modes != ["Norm", "None"] {
        return wrong(format!("modes {modes:?}"));
    }
    let slots = first.tensor(slots)?;
    let [count] = *slots.dims else { return wrong("slots that are no list") };
    let mut planes = Vec::new();
    for (rows, cache) in rows.into_iter().zip(caches) {
        let (rows, cache) = (first.tensor(rows)?, first.output(cache)?);
        let fits = match (&*rows.dims, &*cache.dims) {
            ([n, heads, dim], [_, _, of, width]) => *n == count && (heads, dim) == (of, width),
            _ => false,
        };
        let half = [sys::ACL_FLOAT16, sys::ACL_BF16, sys::ACL_INT8].contains(&rows.dtype);
        let dense = [&rows, &cache, &slots].iter().all(|view| view.is_dense());
        if !fits || !half || !dense || rows.dtype != cache.dtype || slots.dtype != sys::ACL_INT32 {
            return wrong(format!(
                "{:?} rows of type {} for a cache of {:?}",
                rows.dims, rows.dtype, cache.dims
            ));
        }
        check_apart(&cache, &[&rows, &slots])?;
        planes.push((rows, cache));
    }
    let (keys, values) = (&planes[0].1, &planes[1].1);
    if keys.dims[..3] != values.dims[..3] || keys.dtype != values.dtype {
        return wrong(format!("caches of {:?} and {:?}", keys.dims, values.dims));
    }
    Ok(Arc::new(move |state, moment| {
        let slots = numbers(state, &slots, moment)?;
        if slots.iter().collect::<HashSet<_>>().len() < slots.len() {
            return Err("a slot is written twice, in no order".to_owned());
        }
        for (rows, cache) in &planes {
            let from = place(state, rows, moment, false)?;
            let bytes = rows.dims[1] * rows.dims[2] * size_of_type(rows.dtype);
            let room = cache.dims[0] * cache.dims[1];
            for (i, &slot) in slots.iter().enumerate() {
                let Some(slot) = usize::try_from(slot).ok().filter(|&slot| slot < room) else {
                    return Err(format!("slot {slot} of {room}"));
                };
                let start = cache.at + (slot * bytes) as u64;
                let to = state.touch(&(start..start + bytes as u64), moment, true)?;
                // SAFETY: both rows are alive and do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(from.add(i * bytes), to, bytes) };
            }
        }
        Ok(())
    }))
}

operator!(
    aclnnScatterPaKvCache, aclnnScatterPaKvCacheGetWorkspaceSize,
    (key: TensorArgument, keys: TensorArgument, slots: TensorArgument, value: TensorArgument, values: TensorArgument, lengths: TensorArgument, offsets: TensorArgument,
     sequences: TensorArgument, cache_mode: *const c_char, scatter_mode: *const c_char, strides: NumbersArgument, places: NumbersArgument),
    |first, key, keys, slots, value, values, lengths, offsets, sequences, cache_mode, scatter_mode, strides, places| {
        if [lengths, offsets, sequences].iter().any(|x| !x.is_null()) || !strides.is_null() || !places.is_null() {
            return wrong("arguments of other modes");
        }
        scatter(first, [key, value], [keys, values], slots, [cache_mode, scatter_mode])
    }
);

operator!(
    aclnnFusedInferAttentionScoreV2, aclnnFusedInferAttentionScoreV2GetWorkspaceSize,
    (q: TensorArgument, k: ListArgument, v: ListArgument, shift: TensorArgument, mask: TensorArgument, q_lengths: NumbersArgument, lengths: NumbersArgument, d1: TensorArgument,
     s1: TensorArgument, d2: TensorArgument, s2: TensorArgument, o2: TensorArgument, anti_scale: TensorArgument, anti_offset: TensorArgument, table: TensorArgument,
     q_padding: TensorArgument, kv_padding: TensorArgument, k_scale: TensorArgument, k_offset: TensorArgument, v_scale: TensorArgument, v_offset: TensorArgument,
     k_prefix: TensorArgument, v_prefix: TensorArgument, prefix: NumbersArgument, heads: i64, scale: f64, before: i64, after: i64,
     layout: *const c_char, kv_heads: i64, sparse: i64, precise: i64, block_size: i64, anti_mode: i64, with_lse: bool,
     k_mode: i64, v_mode: i64, out: TensorArgument, lse: TensorArgument),
    |first, q, k, v, shift, mask, q_lengths, lengths, d1, s1, d2, s2, o2, anti_scale, anti_offset, table, q_padding,
     kv_padding, k_scale, k_offset, v_scale, v_offset, k_prefix, v_prefix, prefix, heads, scale, before, after, layout,
     kv_heads, sparse, precise, block_size, anti_mode, with_lse, k_mode, v_mode, out, lse| {
        let of_others = [
            shift, mask, d1, s1, d2, s2, o2, anti_scale, anti_offset, q_padding, kv_padding, k_scale, k_offset, v_scale,
            v_offset, k_prefix, v_prefix,
        ];
        let modes = [sparse, precise, anti_mode, k_mode, v_mode];
        let far = i64::from(i32::MAX);
        if of_others.iter().any(|x| !x.is_null()) || !q_lengths.is_null() || !prefix.is_null() || modes != [0; 5]
            || (before, after) != (far, far)
        {
            return wrong("arguments of other modes");
        }
        attention(first, &AttentionArguments {
            q, k, v, lengths, table, heads, scale, layout, kv_heads, block_size, with_lse, out, lse,
        })
    }
);
