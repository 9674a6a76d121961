// The two ends of an attention mass: copies log-sum-exps to the scratch memory, or adds the sums of all units
// of heads to the tensor of sums.
//
// args: number of elements; to copy: heads, then offset and strides of a row and a head in the source; to
// add: number of units, and offsets of the first sum in the source and in the destination.

@group(0) @binding(1) var<storage, read_write> source: array<u32>;
@group(0) @binding(2) var<storage, read_write> dest: array<u32>;

override ADD: bool;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = linear(group, groups) * 64u + thread;
    let count = args[0];
    if (i >= count) {
        return;
    }
    if (!ADD) {
        dest[i] = source[args[2] + i / args[1] * args[3] + i % args[1] * args[4]];
        return;
    }
    var sum = bitcast<f32>(dest[args[3] + i]);
    for (var unit = 0u; unit < args[1]; unit++) {
        sum += bitcast<f32>(source[args[2] + unit * count + i]);
    }
    dest[args[3] + i] = bitcast<u32>(sum);
}
