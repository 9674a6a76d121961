// Copies of rows whose places and lengths are all multiples of 16 bytes: scatter, gather, copy_blocks,
// swap_blocks and copy_tensor where elements keep their type. One thread moves one unit of 16 bytes.
//
// args: [items, n0, n1, n2, units of a row, source strides of the three axes, strides of the destination],
// then the places of each item in source and destination. All in units.

@group(0) @binding(0) var<storage, read> args: array<u32>;
@group(0) @binding(1) var<storage, read_write> source: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> dest: array<vec4<u32>>;

const HEADER: u32 = 11u;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let id = (group.x + group.y * groups.x) * 256u + thread;
    let n = vec3<u32>(args[1], args[2], args[3]);
    let row = args[4];
    let run = id / row;
    let item = run / (n.x * n.y * n.z);
    if (item >= args[0]) {
        return;
    }
    let index = vec3<u32>(run / (n.y * n.z) % n.x, run / n.z % n.y, run % n.z);
    let src = vec3<u32>(args[5], args[6], args[7]) * index;
    let dst = vec3<u32>(args[8], args[9], args[10]) * index;
    let at = id % row;
    let place = HEADER + 2u * item;
    dest[args[place + 1u] + dst.x + dst.y + dst.z + at] = source[args[place] + src.x + src.y + src.z + at];
}
