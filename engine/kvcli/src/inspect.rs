//! `kvc inspect`: what is stored on a disk.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvtier::{Inspection, Slab};

use crate::args::InspectArgs;
use crate::error::Result;
use crate::progress::{bar, counting};
use crate::report::{json, table};

pub(crate) fn inspect(args: &InspectArgs) -> Result<()> {
    let bar = bar("checked", "{pos}/{len} {eta}", args.check && !args.json);
    let found = Slab::inspect(&args.folder, args.check, &mut counting(&bar))?;
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    if args.json {
        return json(&mut out, &found);
    }
    let Inspection { limit_bytes, bytes, records, damaged, ref scopes, .. } = found;
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    write!(out, "{records} records in {} of {}", mib(bytes), mib(limit_bytes))?;
    match damaged {
        Some(0) => writeln!(out, ", none damaged")?,
        Some(count) => writeln!(out, ", {count} damaged; damaged records are computed again")?,
        None => writeln!(out)?,
    }
    if scopes.is_empty() {
        return Ok(());
    }
    let mut table =
        table(&["model", "records", "of prefixes", "tenants", "size", "oldest", "newest", "took", "layout"]);
    for scope in scopes {
        table.add_row([
            scope.scope.clone(),
            scope.records.to_string(),
            scope.chained.to_string(),
            scope.accounts.len().to_string(),
            mib(scope.bytes),
            ago(scope.created[0]),
            ago(scope.created[1]),
            format!("{:.1} s", scope.cost_ms as f64 / 1e3),
            scope.label.clone().unwrap_or_else(|| "unreadable".to_owned()),
        ]);
    }
    writeln!(out, "\n{table}")?;
    Ok(())
}

/// Returns how long ago a time in seconds since 1970 is.
fn ago(seconds: u64) -> String {
    let then = UNIX_EPOCH + Duration::from_secs(seconds);
    let passed = SystemTime::now().duration_since(then).unwrap_or_default().as_secs();
    match passed {
        0..120 => format!("{passed} s ago"),
        120..7200 => format!("{} min ago", passed / 60),
        7200..172_800 => format!("{} h ago", passed / 3600),
        _ => format!("{} days ago", passed / 86_400),
    }
}
