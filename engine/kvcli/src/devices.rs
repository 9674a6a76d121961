//! `kvc devices`: the devices of this machine that `--backend` accepts.

use std::io::Write;

use serde::Serialize;

use crate::args::DevicesArgs;
use crate::error::Result;
use crate::report;

/// A device of one backend.
#[derive(Serialize)]
struct ListedDevice {
    /// The device's name for `--backend`.
    backend: String,
    name: String,
    /// The interface, kind and driver of the device.
    about: String,
    limits: Vec<(&'static str, String)>,
    features: Vec<(&'static str, bool)>,
    /// The reason why the device cannot be used, if there is one.
    unfit: Option<String>,
}

/// A backend without a device in this build or on this machine, with advice.
#[derive(Serialize)]
struct AbsentBackend {
    backend: &'static str,
    reason: String,
}

pub(crate) fn devices(args: &DevicesArgs) -> Result<()> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    cpu(&mut found, &mut missing);
    cuda(&mut found, &mut missing);
    ascend(&mut found, &mut missing);
    wgpu(&mut found, &mut missing);
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

#[cfg(feature = "cpu")]
fn cpu(found: &mut Vec<ListedDevice>, _: &mut Vec<AbsentBackend>) {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    found.push(ListedDevice {
        backend: "cpu".to_owned(),
        name: "host memory".to_owned(),
        about: format!("{} kernels", kvbackend_cpu::CpuBackend::new().simd()),
        limits: vec![("threads", threads.to_string())],
        features: vec![("f16, bf16, quantised caches", true)],
        unfit: None,
    });
}

#[cfg(not(feature = "cpu"))]
fn cpu(_: &mut Vec<ListedDevice>, missing: &mut Vec<AbsentBackend>) {
    missing.push(not_built("cpu"));
}

#[cfg(feature = "cuda")]
fn cuda(found: &mut Vec<ListedDevice>, missing: &mut Vec<AbsentBackend>) {
    let devices = match kvbackend_cuda::devices() {
        Ok(devices) if !devices.is_empty() => devices,
        Ok(_) => {
            return missing
                .push(AbsentBackend { backend: "cuda", reason: "the driver found no device".to_owned() });
        }
        Err(reason) => return missing.push(AbsentBackend { backend: "cuda", reason: reason.to_string() }),
    };
    for device in devices {
        let (major, minor) = device.compute_capability;
        let driver = format!("{}.{}", device.driver / 1000, device.driver % 1000 / 10);
        found.push(ListedDevice {
            backend: format!("cuda:{}", device.ordinal),
            name: device.name,
            about: format!("compute capability {major}.{minor}, driver for CUDA {driver}"),
            limits: vec![("memory", format!("{} MiB", device.total_memory >> 20))],
            features: vec![("f16, bf16, quantised caches", true), ("virtual memory", device.virtual_memory)],
            unfit: device.unfit,
        });
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: &mut Vec<ListedDevice>, missing: &mut Vec<AbsentBackend>) {
    missing.push(not_built("cuda"));
}

#[cfg(feature = "ascend")]
fn ascend(found: &mut Vec<ListedDevice>, missing: &mut Vec<AbsentBackend>) {
    let listed = kvbackend_ascend::devices().and_then(|found| Ok((found, kvbackend_ascend::operators()?)));
    let (devices, operators) = match listed {
        Ok((devices, operators)) if !devices.is_empty() => (devices, operators),
        Ok(_) => {
            return missing
                .push(AbsentBackend { backend: "ascend", reason: "CANN found no device".to_owned() });
        }
        Err(reason) => return missing.push(AbsentBackend { backend: "ascend", reason: reason.to_string() }),
    };
    let missing = operators.iter().filter(|operator| !operator.present);
    let int8 = missing.clone().all(|operator| operator.serves != kvbackend_ascend::Serves::Int8Caches);
    let lacks: Vec<String> =
        missing.map(|operator| format!("{} ({})", operator.name, operator.serves)).collect();
    let lacks = if lacks.is_empty() { "all".to_owned() } else { format!("all but {}", lacks.join(", ")) };
    for device in devices {
        let (major, minor, patch) = device.interface;
        found.push(ListedDevice {
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
        });
    }
}

#[cfg(not(feature = "ascend"))]
fn ascend(_: &mut Vec<ListedDevice>, missing: &mut Vec<AbsentBackend>) {
    missing.push(not_built("ascend"));
}

#[cfg(feature = "wgpu")]
fn wgpu(found: &mut Vec<ListedDevice>, missing: &mut Vec<AbsentBackend>) {
    let adapters = kvbackend_wgpu::adapters();
    if adapters.is_empty() {
        missing.push(AbsentBackend { backend: "wgpu", reason: kvbackend_wgpu::NO_ADAPTER.to_owned() });
    }
    for (i, adapter) in adapters.into_iter().enumerate() {
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        found.push(ListedDevice {
            backend: format!("wgpu:{i}"),
            about: format!("{}, {}, {}", adapter.interface, adapter.kind, adapter.driver),
            name: adapter.name,
            limits: vec![
                ("largest buffer", mib(adapter.max_buffer)),
                ("bound at once", mib(adapter.max_binding)),
                ("workgroup memory", format!("{} KiB", adapter.workgroup_memory >> 10)),
            ],
            features: vec![("f16 arithmetic", adapter.native_f16), ("host memory", adapter.host_memory)],
            unfit: adapter.unfit,
        });
    }
}

#[cfg(not(feature = "wgpu"))]
fn wgpu(_: &mut Vec<ListedDevice>, missing: &mut Vec<AbsentBackend>) {
    missing.push(not_built("wgpu"));
}

#[cfg(not(all(feature = "ascend", feature = "cpu", feature = "cuda", feature = "wgpu")))]
fn not_built(backend: &'static str) -> AbsentBackend {
    AbsentBackend { backend, reason: crate::error::Error::NoBackend(backend).to_string() }
}
