//! Executors, which represent operators between their two phases.

use std::ffi::c_void;
use std::sync::Arc;

use crate::clock::TaskMoment;
use crate::state::{CallResult, SimState, call, lock, refuse};
use crate::task::{Action, TaskWork};
use crate::tensor::{HostNumber, INVALID, NULL, View};
use crate::types as sys;

/// An operator that has passed its first phase.
pub(crate) struct Executor {
    name: &'static str,
    workspace: u64,
    action: Action,
    /// The tensors from the first phase, which must stay alive until the second phase.
    tensors: Vec<u64>,
    /// True if a separate call must destroy the executor.
    repeatable: bool,
}

/// An operator's first phase, which finds its operands and defines its action.
pub(crate) struct First<'a> {
    pub(crate) state: &'a mut SimState,
    tensors: Vec<u64>,
    elements: usize,
}

/// Returns the error for an operator's argument.
pub(crate) fn wrong<T>(rule: impl Into<String>) -> CallResult<T> {
    refuse(INVALID, rule)
}

impl First<'_> {
    /// Returns the view of a tensor argument.
    pub(crate) fn tensor(&mut self, tensor: *const sys::aclTensor) -> CallResult<View> {
        if tensor.is_null() {
            return refuse(NULL, "a tensor that must be there is null");
        }
        let Some(view) = self.state.tensors.get(&(tensor as u64)).cloned() else {
            return wrong("a tensor that was destroyed");
        };
        if let Some(rule) = &view.wrong {
            return wrong(rule.clone());
        }
        self.tensors.push(tensor as u64);
        self.elements += view.len();
        Ok(view)
    }

    /// Returns the view of a tensor argument that the operator writes to.
    pub(crate) fn output(&mut self, tensor: *const sys::aclTensor) -> CallResult<View> {
        let view = self.tensor(tensor)?;
        if view.overlaps_itself() {
            return wrong("a result whose elements share addresses");
        }
        Ok(view)
    }

    /// Returns the view of a list's only tensor.
    pub(crate) fn only(&mut self, list: *const sys::aclTensorList) -> CallResult<View> {
        match self.state.lists.get(&(list as u64)).map(Vec::as_slice) {
            Some(&[tensor]) => self.tensor(tensor as *const sys::aclTensor),
            Some(_) => wrong("a list of several tensors"),
            None => wrong("a list that was destroyed, or null"),
        }
    }

    pub(crate) fn scalar(&self, scalar: *const sys::aclScalar) -> CallResult<HostNumber> {
        match self.state.scalars.get(&(scalar as u64)) {
            Some(&scalar) => Ok(scalar),
            None => wrong("a scalar that was destroyed, or null"),
        }
    }

    pub(crate) fn array(&self, array: *const sys::aclIntArray) -> CallResult<Vec<i64>> {
        match self.state.arrays.get(&(array as u64)) {
            Some(array) => Ok(array.clone()),
            None => wrong("an array that was destroyed, or null"),
        }
    }
}

/// Runs the first phase of an operator.
pub(crate) unsafe fn first(
    name: &'static str,
    workspace: *mut u64,
    to: *mut *mut sys::aclOpExecutor,
    accept: impl FnOnce(&mut First<'_>) -> CallResult<Action>,
) -> sys::aclnnStatus {
    let phase = format!("{name}GetWorkspaceSize");
    call(&phase, |state| {
        state.alive()?;
        let mut first = First { state, tensors: Vec::new(), elements: 0 };
        let action = accept(&mut first).map_err(|mut refusal| {
            refusal.rule = format!("{name}: {}", refusal.rule);
            refusal
        })?;
        let (tensors, elements) = (std::mem::take(&mut first.tensors), first.elements);
        // Operators need workspaces of different sizes, and some need none.
        let wanted = if elements.is_multiple_of(3) { 0 } else { 1000 + elements as u64 % 4096 };
        let handle = state.handle();
        state
            .executors
            .insert(handle, Executor { name, workspace: wanted, action, tensors, repeatable: false });
        *workspace = wanted;
        *to = handle as *mut sys::aclOpExecutor;
        Ok(())
    })
}

/// Runs the second phase of an operator.
pub(crate) fn second(
    name: &'static str,
    workspace: *mut c_void,
    bytes: u64,
    executor: *mut sys::aclOpExecutor,
    stream: sys::aclrtStream,
) -> sys::aclnnStatus {
    // The second phase consumes the executor, even if it fails.
    let executor = lock().executors.remove(&(executor as u64));
    call(name, |state| {
        let stream = state.stream_here(stream)?;
        let Some(executor) = executor else {
            return wrong(format!("{name}: an executor that was used, or is none"));
        };
        if executor.name != name {
            return wrong(format!("{name} with the executor of {}", executor.name));
        }
        if executor.tensors.iter().any(|tensor| !state.tensors.contains_key(tensor)) {
            return wrong(format!("{name}: a tensor was destroyed between the phases"));
        }
        let at = workspace as u64;
        let wanted = executor.workspace;
        if bytes < wanted || (wanted > 0 && (state.device_of(at).is_none() || !at.is_multiple_of(64))) {
            return wrong(format!("{name}: a workspace of {bytes} bytes at {at:#x}, {wanted} wanted"));
        }
        let run = executor.action;
        let action = move |state: &mut SimState, moment: &TaskMoment| {
            if wanted > 0 {
                let place = state.touch(&(at..at + wanted), moment, true)?;
                // SAFETY: the workspace is alive. An operator leaves arbitrary bytes there.
                unsafe { place.write_bytes(0xA5, wanted as usize) };
            }
            run(state, moment).map_err(|fault| format!("{name}: {fault}"))
        };
        state.enqueue(stream, &format!("operator {name}"), TaskWork::Run(Arc::new(action)))
    })
}

/// Keeps an executor until a separate call destroys it. In the simulator, the second phase consumes it
/// anyway, because the backend never uses an executor twice.
#[unsafe(no_mangle)]
pub extern "C" fn aclSetAclOpExecutorRepeatable(executor: *mut sys::aclOpExecutor) -> sys::aclnnStatus {
    call("aclSetAclOpExecutorRepeatable", |state| match state.executors.get_mut(&(executor as u64)) {
        Some(executor) => {
            executor.repeatable = true;
            Ok(())
        }
        None => wrong("an executor that was used, or is none"),
    })
}

/// Destroys an executor that was made repeatable.
#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyAclOpExecutor(executor: *mut sys::aclOpExecutor) -> sys::aclnnStatus {
    call("aclDestroyAclOpExecutor", |state| {
        match state.executors.get(&(executor as u64)).map(|executor| executor.repeatable) {
            Some(true) => {
                state.executors.remove(&(executor as u64));
                Ok(())
            }
            Some(false) => wrong("an executor that the second phase consumes"),
            None => wrong("an executor that was used, or is none"),
        }
    })
}
