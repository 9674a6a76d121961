//! The machine: its card, its driver and its hardware Vulkan adapters, as `kvc devices` lists them.

use std::process::Command;

use serde::Deserialize;
use xtask::cuda_double;
use xtask::run::Result;
use xtask::tools::first_line;

use super::programs::Programs;

/// The result of the search.
pub(super) struct Found {
    /// The name of the first card that the backend can use.
    pub(super) card: Option<String>,
    /// The reason that there is no usable card.
    pub(super) missing: String,
    /// Names and values for the report.
    pub(super) facts: Vec<(String, String)>,
    /// The names of the hardware Vulkan adapters.
    pub(super) adapters: Vec<String>,
}

/// The output of `kvc devices --json`.
#[derive(Deserialize)]
struct DeviceList {
    devices: Vec<ListedDevice>,
    missing: Vec<MissingBackend>,
}

#[derive(Deserialize)]
struct ListedDevice {
    backend: String,
    name: String,
    about: String,
    limits: Vec<(String, String)>,
    unfit: Option<String>,
}

#[derive(Deserialize)]
struct MissingBackend {
    backend: String,
    reason: String,
}

/// Adds CUDA's libraries to a command's search path: cuBLAS and NVRTC from an installed toolkit, or the
/// double.
pub(super) fn libraries(command: &mut Command, double: bool) -> Result {
    if double {
        return cuda_double::insist(command);
    }
    let before = std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty());
    let given: Vec<_> = before.iter().flat_map(std::env::split_paths).collect();
    let toolkit = ["/usr/local/cuda/lib64"].map(std::path::PathBuf::from);
    let all = std::env::join_paths(given.into_iter().chain(toolkit)).unwrap_or_default();
    command.env("LD_LIBRARY_PATH", all);
    Ok(())
}

/// Looks for cards and adapters.
pub(super) fn found(programs: &Programs, double: bool) -> Result<Found> {
    let mut command = Command::new(programs.path("kvc")?);
    command.args(["devices", "--json"]);
    libraries(&mut command, double)?;
    let output = command.output().map_err(|e| format!("kvc cannot be run: {e}"))?;
    let mut found = listed(&String::from_utf8_lossy(&output.stdout))?;
    let query =
        ["--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv,noheader"];
    if let (false, Some(line)) = (double, first_line("nvidia-smi", &query)) {
        found.facts.push(("nvidia-smi".to_owned(), line));
    }
    if let Some(date) = first_line("date", &["-u", "+%Y-%m-%d %H:%M"]) {
        found.facts.insert(0, ("date (UTC)".to_owned(), date));
    }
    Ok(found)
}

/// Parses the output of `kvc devices --json`.
fn listed(json: &str) -> Result<Found> {
    let listed: DeviceList = serde_json::from_str(json).map_err(|e| format!("kvc devices: {e}"))?;
    let mut found =
        Found { card: None, missing: "no card is there".to_owned(), facts: Vec::new(), adapters: Vec::new() };
    for ListedDevice { backend, name, about, limits, unfit } in listed.devices {
        let limits: Vec<String> = limits.into_iter().map(|(what, value)| format!("{what} {value}")).collect();
        let unfit = unfit.map(|reason| format!("; cannot be used: {reason}"));
        let usable = unfit.is_none();
        if backend.starts_with("wgpu:") && about.starts_with("vulkan") && !about.contains(", cpu,") && usable
        {
            found.adapters.push(name.clone());
        }
        if backend.starts_with("cuda:") {
            let text = format!("{name}, {about}, {}{}", limits.join(", "), unfit.unwrap_or_default());
            found.missing.clone_from(&text);
            found.facts.push((backend, text));
            found.card = found.card.or(usable.then_some(name));
        } else if backend.starts_with("wgpu:") {
            found.facts.push((backend, format!("{name}, {about}")));
        }
    }
    if let Some(MissingBackend { reason, .. }) = listed.missing.into_iter().find(|it| it.backend == "cuda") {
        found.missing = reason;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(backend: &str, about: &str, unfit: &str) -> String {
        format!(
            r#"{{"backend":"{backend}","name":"N","about":"{about}","limits":[["memory","1 MiB"]],"features":[],"unfit":{unfit}}}"#
        )
    }

    fn found(devices: &[String], missing: &str) -> Result<Found> {
        listed(&format!(r#"{{"devices":[{}],"missing":[{missing}]}}"#, devices.join(",")))
    }

    #[test]
    fn cards_and_adapters_are_usable_hardware() {
        let all = [
            device("cpu", "avx2 kernels", "null"),
            device("cuda:0", "compute capability 9.0", "null"),
            device("wgpu:0", "vulkan, discrete, NVIDIA 1", "null"),
            device("wgpu:1", "vulkan, cpu, llvmpipe", "null"),
        ];
        let Ok(found) = found(&all, "") else { panic!("the list is read") };
        assert_eq!((found.card.as_deref(), found.adapters.len()), (Some("N"), 1));
        assert_eq!(found.facts[0].1, "N, compute capability 9.0, memory 1 MiB");
    }

    #[test]
    fn a_card_that_is_too_old_and_a_missing_driver_are_reasons() {
        let old = found(&[device("cuda:0", "compute capability 7.5", "\"too old\"")], "");
        assert!(old.is_ok_and(|it| it.card.is_none() && it.missing.ends_with("cannot be used: too old")));
        let none = found(&[], r#"{"backend":"cuda","reason":"no driver"}"#);
        assert!(none.is_ok_and(|it| it.card.is_none() && it.missing == "no driver"));
        assert!(listed("no JSON").is_err());
    }
}
