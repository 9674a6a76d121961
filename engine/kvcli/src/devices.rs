//! `kvc devices`: the devices of this machine that `--backend` accepts.

use std::io::Write;

use serde::Serialize;

use crate::args::DevicesArgs;
use crate::error::Result;
use crate::report;

/// A device of one backend.
#[derive(Serialize)]
struct ListedDevice {
    /// The name that `--backend` accepts for the device.
    backend: String,
    name: String,
    /// The device's interface, kind and driver.
    about: String,
    limits: Vec<(&'static str, String)>,
    features: Vec<(&'static str, bool)>,
    /// The reason why the device cannot be used; `None` if it can be used.
    unfit: Option<String>,
}

/// A backend that has no device in this build or on this machine, with the reason and advice for the user.
#[derive(Serialize)]
struct AbsentBackend {
    backend: &'static str,
    reason: String,
}

pub(crate) fn devices(args: &DevicesArgs) -> Result<()> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for (backend, listed) in [("cpu", cpu()), ("cuda", cuda()), ("ascend", ascend()), ("wgpu", wgpu())] {
        match listed {
            Ok(listed) => found.extend(listed),
            Err(reason) => missing.push(AbsentBackend { backend, reason }),
        }
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", serde_json::json!({ "devices": found, "missing": missing }))?;
        return Ok(());
    }
    let mut table = report::table(&["--backend", "device", "limits", "features"]);
    for device in &found {
        let limits: Vec<String> =
            device.limits.iter().map(|(what, value)| format!("{what}: {value}")).collect();
        let features: Vec<String> = device
            .features
            .iter()
            .map(|(what, has)| if *has { (*what).to_owned() } else { format!("no {what}") })
            .collect();
        let unfit = device.unfit.iter().map(|reason| format!("cannot be used: {reason}"));
        let name: Vec<String> =
            [device.name.clone(), device.about.clone()].into_iter().chain(unfit).collect();
        let name = name.join("\n");
        table.add_row([device.backend.clone(), name, limits.join("\n"), features.join("\n")]);
    }
    writeln!(out, "{table}")?;
    for AbsentBackend { backend, reason } in &missing {
        writeln!(out, "\n{backend}: {reason}")?;
    }
    Ok(())
}

/// The devices of a backend, or the reason why it does not have any.
type Listed = std::result::Result<Vec<ListedDevice>, String>;

#[cfg(feature = "cpu")]
#[expect(clippy::unnecessary_wraps, reason = "other backends may have no device")]
fn cpu() -> Listed {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Ok(vec![ListedDevice {
        backend: "cpu".to_owned(),
        name: "host memory".to_owned(),
        about: format!("{} kernels", kvbackend_cpu::CpuBackend::new().simd()),
        limits: vec![("threads", threads.to_string())],
        features: vec![("f16, bf16, quantised caches", true)],
        unfit: None,
    }])
}

#[cfg(not(feature = "cpu"))]
fn cpu() -> Listed {
    not_built("cpu")
}

#[cfg(feature = "cuda")]
fn cuda() -> Listed {
    let devices = kvbackend_cuda::devices().map_err(|reason| reason.to_string())?;
    if devices.is_empty() {
        return Err("the driver found no device".to_owned());
    }
    let listed = devices.into_iter().map(|device| {
        let (major, minor) = device.compute_capability;
        let driver = format!("{}.{}", device.driver / 1000, device.driver % 1000 / 10);
        ListedDevice {
            backend: format!("cuda:{}", device.ordinal),
            name: device.name,
            about: format!("compute capability {major}.{minor}, driver for CUDA {driver}"),
            limits: vec![("memory", format!("{} MiB", device.total_memory >> 20))],
            features: vec![("f16, bf16, quantised caches", true), ("virtual memory", device.virtual_memory)],
            unfit: device.unfit,
        }
    });
    Ok(listed.collect())
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Listed {
    not_built("cuda")
}

#[cfg(feature = "ascend")]
fn ascend() -> Listed {
    let listed = kvbackend_ascend::devices().and_then(|found| Ok((found, kvbackend_ascend::operators()?)));
    let (devices, operators) = listed.map_err(|reason| reason.to_string())?;
    if devices.is_empty() {
        return Err("CANN found no device".to_owned());
    }
    let missing = operators.iter().filter(|operator| !operator.present);
    let int8 = missing.clone().all(|operator| operator.serves != kvbackend_ascend::Serves::Int8Caches);
    let lacks: Vec<String> =
        missing.map(|operator| format!("{} ({})", operator.name, operator.serves)).collect();
    let lacks = if lacks.is_empty() { "all".to_owned() } else { format!("all except {}", lacks.join(", ")) };
    let listed = devices.into_iter().map(|device| {
        let (major, minor, patch) = device.interface;
        ListedDevice {
            backend: format!("ascend:{}", device.ordinal),
            name: device.name,
            about: format!("ACL {major}.{minor}.{patch}"),
            limits: vec![
                ("memory", format!("{} MiB", device.total_memory >> 20)),
                ("operators", lacks.clone()),
            ],
            features: vec![
                ("f16, bf16 caches", true),
                ("int8 caches", int8),
                ("graphs", device.graphs),
                ("virtual memory", device.virtual_memory),
            ],
            unfit: device.unfit,
        }
    });
    Ok(listed.collect())
}

#[cfg(not(feature = "ascend"))]
fn ascend() -> Listed {
    not_built("ascend")
}

#[cfg(feature = "wgpu")]
fn wgpu() -> Listed {
    let adapters = kvbackend_wgpu::adapters();
    if adapters.is_empty() {
        return Err(kvbackend_wgpu::NO_ADAPTER.to_owned());
    }
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let listed = adapters.into_iter().enumerate().map(|(i, adapter)| ListedDevice {
        backend: format!("wgpu:{i}"),
        about: format!("{}, {}, {}", adapter.interface, adapter.kind, adapter.driver),
        name: adapter.name,
        limits: vec![
            ("largest buffer", mib(adapter.max_buffer)),
            ("largest binding", mib(adapter.max_binding)),
            ("workgroup memory", format!("{} KiB", adapter.workgroup_memory >> 10)),
        ],
        features: vec![("f16 arithmetic", adapter.native_f16), ("host memory", adapter.host_memory)],
        unfit: adapter.unfit,
    });
    Ok(listed.collect())
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Listed {
    not_built("wgpu")
}

#[cfg(not(all(feature = "ascend", feature = "cpu", feature = "cuda", feature = "wgpu")))]
fn not_built(backend: &'static str) -> Listed {
    Err(crate::error::Error::NoBackend(backend).to_string())
}
