// runs before the page's own script
window.faults=[];

addEventListener("error",e=>faults.push(e.message));
for(const n of ["error","warn"]){const o=console[n];
console[n]=(...a)=>{faults.push(a.join(" "));o(...a);};}
