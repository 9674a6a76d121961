//! `kvc size`: the memory that keys and values of a model take.

use std::io::Write;

use kvcore::{DType, KvExtents, KvFormat, KvLayout, RankInfo};
use kvmodel::ModelDirectory;
use serde::Serialize;

use crate::args::SizeArgs;
use crate::error::Result;
use crate::report::{json, table};

/// The formats that are shown if none is asked for.
const USUAL: [&str; 4] = ["bf16", "fp8-e4m3", "int8", "int4"];

/// The sizes of a model's keys and values, in bytes.
#[derive(Debug, Serialize)]
struct SizeReport {
    layers: usize,
    /// The number of rows that a token has in each layer, in K and in V, with the elements of each.
    k_heads: usize,
    k_dim: usize,
    v_heads: usize,
    v_dim: usize,
    context: usize,
    requests: usize,
    block_size: usize,
    formats: Vec<FormatSize>,
}

/// The sizes in one storage format.
#[derive(Debug, Serialize)]
struct FormatSize {
    dtype: String,
    /// The bytes of one token, including its share of a block's scales. Scales that hold for all blocks are not counted.
    bytes_per_token: f64,
    /// The bytes of a request, in whole blocks.
    bytes_per_request: u64,
    /// The bytes of all requests.
    bytes: u64,
    /// The number of requests that fit into the given memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    fit: Option<u64>,
}

pub(crate) fn size(args: &SizeArgs) -> Result<()> {
    let config = ModelDirectory::read_config(&args.model).map_err(kvengine::Error::from)?;
    let context = args.context.unwrap_or(config.max_positions);
    let of = |format: KvFormat| of_format(args, context, &config.kv_extents(format));
    let formats: Vec<FormatSize> = if args.formats.is_empty() {
        // A head may not divide into the groups of a format's scales.
        let usual = USUAL.iter().filter_map(|name| of(name.parse().ok()?).ok());
        [of(DType::F32.into())?].into_iter().chain(usual).collect()
    } else {
        args.formats.iter().map(|&format| of(format)).collect::<kvengine::Result<_>>()?
    };
    let KvExtents { num_layers, k_heads, v_heads, k_dim, v_dim, .. } = config.kv_extents(DType::F32);
    let report = SizeReport {
        layers: num_layers,
        k_heads,
        k_dim,
        v_heads,
        v_dim,
        context,
        requests: args.requests,
        block_size: args.block_size,
        formats,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        return json(&mut out, &report);
    }
    writeln!(
        out,
        "{} layers with {k_heads} x {k_dim} elements of K and {v_heads} x {v_dim} of V for each token; requests of \
         {context} tokens",
        report.layers,
    )?;
    show(args, &report, &mut out)?;
    if context > config.max_positions {
        note!(
            "The model has at most {} positions; longer requests need its config changed.",
            config.max_positions
        );
    }
    let windows = config.layers.iter().filter(|layer| layer.window.is_some()).count();
    if windows > 0 {
        note!("{windows} layers have a sliding window; with --cache grouped, they keep only its tokens.");
    }
    Ok(())
}

fn show(args: &SizeArgs, report: &SizeReport, out: &mut impl Write) -> Result<()> {
    let requests = format!("{} requests", report.requests);
    let fit = args.kv_memory.map(|mib| format!("requests in {mib} MiB"));
    let titles: Vec<&str> = ["--dtype", "per token", "per request"]
        .into_iter()
        .chain((report.requests > 1).then_some(requests.as_str()))
        .chain(fit.as_deref())
        .collect();
    let mut table = table(&titles);
    for size in &report.formats {
        let per_token = readable(size.bytes_per_token);
        let all = (report.requests > 1).then(|| readable(size.bytes as f64));
        let row = [size.dtype.clone(), per_token, readable(size.bytes_per_request as f64)];
        table.add_row(row.into_iter().chain(all).chain(size.fit.map(|fit| fit.to_string())));
    }
    writeln!(out, "{table}")?;
    Ok(())
}

/// Computes the sizes in one format, as the engine lays blocks out.
fn of_format(args: &SizeArgs, context: usize, extents: &KvExtents) -> kvengine::Result<FormatSize> {
    let layout = KvLayout::new(extents.shape(&RankInfo::default(), 1, args.block_size)?)?;
    let block = layout.block_bytes() as u64;
    let bytes_per_request = block.saturating_mul(context.div_ceil(args.block_size) as u64);
    Ok(FormatSize {
        dtype: extents.format.to_string(),
        bytes_per_token: block as f64 / args.block_size as f64,
        bytes_per_request,
        bytes: bytes_per_request.saturating_mul(args.requests as u64),
        fit: args.kv_memory.map(|mib| (mib as u64).saturating_mul(1 << 20) / bytes_per_request),
    })
}

/// Returns a number of bytes for people.
fn readable(bytes: f64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.into_iter().find(|(_, power)| bytes >= f64::from(1 << power));
    match unit {
        Some((name, power)) => format!("{:.1} {name}", bytes / f64::from(1 << power)),
        None => format!("{bytes:.0} B"),
    }
}
