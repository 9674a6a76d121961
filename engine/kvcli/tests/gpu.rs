//! The program with keys, values and attention on a device: a wgpu adapter (which may be software), a CUDA
//! device (or the driver's test double), or an NPU (or the CANN simulator).
#![cfg(all(feature = "ascend", feature = "cuda", feature = "wgpu"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rstest::rstest;
use serde_json::Value;

/// Returns the JSON that a command prints, or `None` with a message if the machine has no such device.
fn json(args: &[&str]) -> Option<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_kvc")).args(args).stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    if stderr.contains("no device for the") {
        kvconform::skip(stderr.trim());
        return None;
    }
    assert!(output.status.success(), "{args:?}: {stderr}");
    Some(serde_json::from_slice(&output.stdout).expect("one JSON value"))
}

#[rstest]
fn the_demo_answers_as_on_the_cpu(#[values("ascend", "cuda", "wgpu")] backend: &str) {
    let without_times = |answers: &Value| -> Vec<Value> {
        let strip = |answer: &Value| {
            let mut answer = answer.clone();
            let fields = answer.as_object_mut().unwrap();
            fields.retain(|name, _| !name.contains("_ms") && name != "largest_logit_difference");
            answer
        };
        answers.as_array().unwrap().iter().map(strip).collect()
    };
    // Every format is tested below with a shorter command.
    let demo = |backend: &str| json(&["demo", "--json", "--dtype", "int8", "--backend", backend]);
    let Some(there) = demo(backend) else { return };
    let here = demo("cpu").unwrap();
    assert_eq!(without_times(&there), without_times(&here));
    assert!(here.as_array().unwrap().len() > 3);
}

/// Returns the cache formats that a backend supports. The only quantised formats of the Ascend backend
/// are int8's.
fn formats(backend: &str) -> &'static [&'static str] {
    let formats: &[&str] = &["f32", "f16", "bf16", "int8", "int4", "fp8-e4m3", "fp8-e5m2"];
    &formats[..if backend == "ascend" { 4 } else { formats.len() }]
}

#[rstest]
fn the_demo_names_the_device(#[values("ascend", "cuda", "wgpu")] backend: &str) {
    let Some(devices) = json(&["devices", "--json"]) else { return };
    let first = format!("{backend}:0");
    let Some(device) = devices["devices"].as_array().unwrap().iter().find(|d| d["backend"] == first.as_str())
    else {
        return kvconform::skip(format!("there is no {first}"));
    };
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvc"));
    let mut demo = command.args(["demo", "--backend", &first]).stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    BufReader::new(demo.stdout.take().unwrap()).read_line(&mut text).unwrap();
    // The first line names the device; the answers are tested above.
    demo.kill().unwrap();
    demo.wait().unwrap();
    assert!(text.contains(&format!("on {backend} ({}", device["name"].as_str().unwrap())), "{text}");
}

#[rstest]
fn every_format_of_the_cache_gives_the_tokens_of_the_cpu(#[values("ascend", "cuda", "wgpu")] gpu: &str) {
    for format in formats(gpu) {
        let tokens = |backend: &str| {
            let prompt = "you answer questions ## alba is red . ## cedo is blue . bora is same . ## bora ?";
            let run = [
                "run",
                "--json",
                "--separator",
                "##",
                "--dtype",
                format,
                "--backend",
                backend,
                "--prompt",
                prompt,
            ];
            json(&run).map(|answer| answer["tokens"].clone())
        };
        let Some(there) = tokens(gpu) else { return };
        assert_eq!(Some(there), tokens("cpu"), "{format}");
    }
}

/// Decode steps of several prompts are replays of one graph.
#[rstest]
fn graphs_give_the_answer_of_single_launches(#[values("ascend", "cuda")] gpu: &str) {
    let prompt = |name: &str| format!("you answer questions ## alba is red . ## cedo is blue . ## {name} ?");
    let (ask, warm) = (prompt("cedo"), prompt("alba"));
    let answer = |graphs: &str| {
        let run =
            ["run", "--json", "--separator", "##", "--backend", gpu, "--graphs", graphs, "--prompt", &ask];
        json(&[&run[..], &["--warm", &warm, "--warm", &ask, "--warm", &warm]].concat())
    };
    let Some(by_graphs) = answer("4") else { return };
    let eager = answer("0").unwrap();
    assert_eq!((&by_graphs["tokens"], &by_graphs["text"]), (&eager["tokens"], &eager["text"]));
    assert!(by_graphs["graphs"]["replayed"].as_u64() > Some(0), "{}", by_graphs["graphs"]);
    assert_eq!((&by_graphs["graphs"]["refused"], &eager["graphs"]), (&Value::from(0), &Value::Null));
}

/// Keys and values of chunks are moved to the host and back.
#[rstest]
fn chunks_sleep_and_wake_as_on_the_cpu(#[values("ascend", "cuda", "wgpu")] gpu: &str) {
    let (system, a, b) = ("you answer questions", "alba is red .", "cedo is blue . bora is same .");
    let ask = format!("{system} ## {a} ## {b} ## bora ?");
    let warm = format!("{system} ## {b} ## {a} ## alba ?");
    for form in ["plain", "compressed", "int8"] {
        let answer = |backend: &str| {
            let run = [
                "run",
                "--json",
                "--separator",
                "##",
                "--backend",
                backend,
                "--prompt",
                &ask,
                "--warm",
                &warm,
            ];
            json(&[&run[..], &["--chunk-sleep", form, "--chunk-sleep-memory", "1"]].concat())
        };
        let Some(there) = answer(gpu) else { return };
        let here = answer("cpu").unwrap();
        assert_eq!((&there["sleep"]["slept"], &there["sleep"]["woken"]), (&Value::from(2), &Value::from(2)));
        assert_eq!((&there["tokens"], &there["sleep"]), (&here["tokens"], &here["sleep"]), "{form}");
    }
}

#[test]
fn devices_are_listed_with_their_features() {
    let devices = json(&["devices", "--json"]).unwrap();
    let (found, missing) = (devices["devices"].as_array().unwrap(), devices["missing"].as_array().unwrap());
    assert!(found.iter().any(|device| device["backend"] == "cpu"));
    match found.iter().find(|device| device["backend"].as_str().unwrap().starts_with("wgpu:")) {
        Some(adapter) => {
            assert!(!adapter["name"].as_str().unwrap().is_empty());
            assert!(adapter["limits"].to_string().contains("largest buffer"), "{adapter}");
        }
        None => {
            assert!(
                missing.iter().find(|m| m["backend"] == "wgpu").unwrap()["reason"]
                    .as_str()
                    .unwrap()
                    .contains("mesa-vulkan-drivers"),
                "{missing:?}"
            );
        }
    }
}

#[test]
fn an_unknown_adapter_is_named() {
    let args = ["demo", "--backend", "wgpu:no such card"];
    let output = Command::new(env!("CARGO_BIN_EXE_kvc")).args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("no device for the wgpu backend"), "{stderr}");
    assert!(stderr.contains("no such card") || stderr.contains("mesa-vulkan-drivers"), "{stderr}");
}

#[test]
fn a_wrong_device_is_named() {
    for (backend, message) in [
        ("cuda:99", "no device for the cuda backend"),
        ("cuda:x", "not the index of a CUDA device"),
        ("ascend:99", "no device for the ascend backend"),
        ("ascend:x", "not the index of an Ascend device"),
    ] {
        let args = ["demo", "--backend", backend];
        let output = Command::new(env!("CARGO_BIN_EXE_kvc")).args(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(message), "{stderr}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn without_a_driver_it_says_so() {
    let without = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvc"));
        command.env_remove("LD_LIBRARY_PATH").env("KV_DOUBLE_DEVICES", "0").args(args).output().unwrap()
    };
    let output = without(&["demo", "--backend", "cuda"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        return println!("this machine has a driver");
    }
    assert!(stderr.contains("no device for the cuda backend"), "{stderr}");
    let output = without(&["devices"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("cuda: "), "{stdout}");
}

#[test]
#[cfg(target_os = "linux")]
fn without_cann_it_says_so() {
    let without = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvc"));
        command.env("KV_ASCEND_LIB_DIR", "/no/such/folder").args(args).output().unwrap()
    };
    let output = without(&["demo", "--backend", "ascend"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("no device for the ascend backend"), "{stderr}");
    assert!(stderr.contains("/no/such/folder/libascendcl.so") && stderr.contains("set_env.sh"), "{stderr}");
    let output = without(&["devices"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("ascend: "), "{stdout}");
}

#[test]
#[cfg(target_os = "linux")]
fn without_an_adapter_the_message_names_the_package_to_install() {
    let without = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvc"));
        // Each version of the Vulkan loader reads one of these two variables.
        command.envs([("VK_DRIVER_FILES", "/nowhere"), ("VK_ICD_FILENAMES", "/nowhere")]);
        command.args(args).output().unwrap()
    };
    let output = without(&["demo", "--backend", "wgpu"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty(), "{stderr}");
    assert!(stderr.contains("apt-get install mesa-vulkan-drivers libvulkan1"), "{stderr}");
    let output = without(&["devices"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("mesa-vulkan-drivers"), "{stdout}");
}
